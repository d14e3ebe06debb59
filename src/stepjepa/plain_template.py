"""The form of records without a chat: the user's text, ``<|perception|>``, the answer.

Models that are pretrained from random weights in the published experiments never see a chat template. Only the last
question and its answer are rendered; system prompts and earlier turns have no place in this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepjepa.errors import UserError
from stepjepa.template import Message, Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCEPTION = "<|perception|>"

# The published scripts end every row with this token, whatever the tokenizer's own eos token is.
_END_OF_TURN = "<|eot_id|>"


class PlainTemplate:
    """What :class:`~stepjepa.template.ChatTemplate` does for chats, for records without a chat format.

    Args:
        tokenizer: one that knows ``<|perception|>``; it is not changed.

    Attributes:
        end_of_turn: the token that closes an answer.

    Raises:
        UserError: the tokenizer lacks a token that this form needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        if PERCEPTION not in known:
            raise UserError(
                f"--plain is for models trained without a chat format, but this tokenizer has no token '{PERCEPTION}'; "
                "leave --plain out"
            )
        end = _END_OF_TURN if _END_OF_TURN in known else tokenizer.eos_token
        if end is None:
            raise UserError("the tokenizer has no token that could end an answer; give it an eos_token")
        self.end_of_turn = str(end)
        self.end_of_turn_ids = [int(known[self.end_of_turn])]

    def render(self, messages: Sequence[Message]) -> Rendered:
        """The last question and its answer as text."""
        question, answer = messages[-2]["content"], messages[-1]["content"]
        start = len(question) + len(PERCEPTION)
        text = question + PERCEPTION + answer + self.end_of_turn
        left_out = [(0, 0)] * (len(messages) - 2)
        spans = (*left_out, (0, len(question)), (start, start + len(answer)))
        ends = (*[0] * (len(messages) - 2), len(question), len(text))
        return Rendered(text, spans, ends)

    def prompt(self, messages: Sequence[Message]) -> str:
        """What precedes the answer: the last question.

        Args:
            messages: the chat without its last assistant message.
        """
        return messages[-1]["content"] + PERCEPTION
