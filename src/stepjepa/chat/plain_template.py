"""The form of records without a chat: the user's text, ``<|perception|>``, the answer.

Models that are pretrained from random weights in the published experiments never see a chat template. Only the last
question and its answer are rendered; system prompts and earlier turns have no place in this form. Where the loss is on
all tokens, as in pretraining on paraphrases, the answer is left out too: it is the other view of the same thing, and
stands in a record of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.chat.template import Message, Rendered, refuse_slow
from stepjepa.data.tools import uses_tools
from stepjepa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCEPTION = "<|perception|>"

# The published scripts end every row with this token, whatever the tokenizer's own eos token is.
END_OF_TURN = "<|eot_id|>"


def add_plain_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Add ``<|perception|>`` and ``<|eot_id|>`` to a tokenizer where they are missing, as special tokens.

    Returns:
        The ids of the two, in this order.
    """
    tokens, known = [PERCEPTION, END_OF_TURN], tokenizer.get_vocab()
    missing = [token for token in tokens if token not in known]
    tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
    return [int(index) for index in tokenizer.convert_tokens_to_ids(tokens)]


class PlainTemplate:
    """What :class:`~stepjepa.chat.template.ChatTemplate` does for chats, for records without a chat format.

    Args:
        tokenizer: fast, one that knows ``<|perception|>`` (:func:`add_plain_tokens`); it is not changed.
        answers: the answer stands in the row; otherwise the row is the user's text and the end-of-turn token.

    Attributes:
        end_of_turn: the token that closes a row.
        begin: what stands before every text: the begin-of-text token of tokenizers that write one themselves, or
            nothing.

    Raises:
        UserError: the tokenizer lacks a token that this form needs, or has no fast version.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, answers: bool = True) -> None:
        refuse_slow(tokenizer)
        known = tokenizer.get_vocab()
        if PERCEPTION not in known:
            raise UserError(
                f"--plain is for models trained without a chat format, but this tokenizer has no token '{PERCEPTION}'; "
                "leave --plain out"
            )
        end = END_OF_TURN if END_OF_TURN in known else tokenizer.eos_token
        if end is None:
            raise UserError("the tokenizer has no token that could end an answer; give it an eos_token")
        self.answers = answers
        self.end_of_turn = str(end)
        self.end_of_turn_ids = [int(known[self.end_of_turn])]
        begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.begin = str(tokenizer.bos_token) if begins else ""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """The last question and its answer as text; what is left out has the span ``(0, 0)``."""
        prompt, answer = self.render_prompt(messages[:-1], tools), messages[-1]["content"]
        if not self.answers:
            text = prompt.text.removesuffix(PERCEPTION) + self.end_of_turn
            return Rendered(text, (*prompt.spans, (0, 0)), (*prompt.turn_ends[:-1], len(text), 0))
        start, text = len(prompt.text), prompt.text + answer + self.end_of_turn
        return Rendered(text, (*prompt.spans, (start, start + len(answer))), (*prompt.turn_ends, len(text)))

    def render_alone(self, role: str, content: str) -> Rendered:
        """One message by itself, as a view that sees nothing else: its bare content, whatever the role."""
        start = len(self.begin)
        end = start + len(content)
        return Rendered(self.begin + content, ((start, end),), (end,))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """What precedes the answer: the last question.

        Args:
            messages: the chat without its last assistant message.
            tools: must be none.

        Raises:
            UserError: the chat has tools, for which this form has no place.
        """
        if tools or uses_tools(messages):
            raise UserError("--plain has no place for tool calls; leave it out")
        alone = self.render_alone("user", messages[-1]["content"])
        earlier = len(messages) - 1
        return Rendered(
            alone.text + PERCEPTION, (*[(0, 0)] * earlier, *alone.spans), (*[0] * earlier, *alone.turn_ends)
        )

    def describe(self) -> dict[str, str]:
        """What a record looks like, for reports: the same keys as of a chat template, and ``form``."""
        parts = ("user", PERCEPTION, "answer") if self.answers else ("user",)
        return {
            "form": " ".join(("plain:", *parts, self.end_of_turn)),
            "system role": "no: left out",
            "lone assistant turn": "yes: its bare content",
            "end of turn": repr(self.end_of_turn),
            "begin of text": repr(self.begin) if self.begin else "none",
            "date": "none",
            "last content token": "user -1, assistant -1",
        }
