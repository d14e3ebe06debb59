"""The plain format, for records without a chat format: the user's text, ``<|perception|>``, the answer.

Models that are pretrained from random weights in the published experiments use no chat template. Only the last question
and its answer are rendered; system prompts and earlier turns are left out. Where the loss is on all tokens, as in
pretraining on paraphrases, the answer is left out too: it is the other view of the same content, and has a record of
its own.
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
    """Add ``<|perception|>`` and ``<|eot_id|>`` to a tokenizer that lacks them, as special tokens.

    Returns:
        The ids of the two, in this order.
    """
    tokens, known = [PERCEPTION, END_OF_TURN], tokenizer.get_vocab()
    missing = [token for token in tokens if token not in known]
    tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
    return [int(index) for index in tokenizer.convert_tokens_to_ids(tokens)]


class PlainTemplate:
    """The plain format, with the interface of :class:`~stepjepa.chat.template.ChatTemplate`.

    Args:
        tokenizer: a fast tokenizer with the token ``<|perception|>`` (:func:`add_plain_tokens`); it is not changed.
        answers: include the answer in a row; otherwise a row is the user's text and the end-of-turn token.

    Attributes:
        end_of_turn: the token that closes a row.
        begin: the begin-of-text token, if the tokenizer itself puts one before every text; otherwise empty.

    Raises:
        UserError: the tokenizer lacks a token that this format needs, or has no fast version.
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
        """Render the last question and its answer; a message that is left out has the span ``(0, 0)``."""
        prompt, answer = self.render_prompt(messages[:-1], tools), messages[-1]["content"]
        if not self.answers:
            text = prompt.text.removesuffix(PERCEPTION) + self.end_of_turn
            return Rendered(text, (*prompt.spans, (0, 0)), (*prompt.turn_ends[:-1], len(text), 0))
        start, text = len(prompt.text), prompt.text + answer + self.end_of_turn
        return Rendered(text, (*prompt.spans, (start, start + len(answer))), (*prompt.turn_ends, len(text)))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message by itself, as a view that sees nothing else: its bare content, whatever the role."""
        start = len(self.begin)
        end = start + len(content)
        return Rendered(self.begin + content, ((start, end),), (end,))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """Render what precedes the answer: the last question and ``<|perception|>``.

        Args:
            messages: the chat without its last assistant message.
            tools: must be empty.

        Raises:
            UserError: the chat has tools, which this format does not support.
        """
        if tools or uses_tools(messages):
            raise UserError("--plain does not support tool calls; train without --plain")
        alone = self.render_alone("user", messages[-1]["content"])
        earlier = len(messages) - 1
        return Rendered(
            alone.text + PERCEPTION, (*[(0, 0)] * earlier, *alone.spans), (*[0] * earlier, *alone.turn_ends)
        )

    def describe(self) -> dict[str, str]:
        """Properties of the format, for reports: the keys that a chat template has, and ``form``."""
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
