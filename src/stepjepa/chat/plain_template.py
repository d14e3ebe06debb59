"""The plain format, which has no chat template; it has the interface of ``chat.template``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError
from stepjepa.chat.marks import REASONING_KEYS, Message, Span
from stepjepa.chat.special_tokens import END_OF_TURN, PERCEPTION, check_special_tokens
from stepjepa.chat.tokens import check_fast
from stepjepa.chat.turn_text import Rendered, Tools, Turn, Variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainTemplate:
    """The plain format, for records without a chat format: the user's text, ``<|perception|>``, the answer.

    Only the last question and its answer are rendered; any other message has the span ``(0, 0)``. Without ``answers``
    (losses on all tokens, as in pretraining on paraphrases) the answer is not rendered: it is another view of the same
    content, and a record of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, answers: bool = True) -> None:
        check_fast(tokenizer)
        check_special_tokens(tokenizer)
        vocabulary = tokenizer.get_vocab()
        if lacking := {PERCEPTION, END_OF_TURN} - vocabulary.keys():
            fault = f"`plain` is for models without a chat format, and this tokenizer has no token '{min(lacking)}'"
            raise UserError(f"{fault}; leave `plain` out")
        self.answers = answers
        self.writes_tools, self.writes_calls, self.variables = False, False, frozenset[str]()
        self.closer = ""
        self.stop_tokens = [END_OF_TURN]
        self.stop_ids = [int(vocabulary[END_OF_TURN])]
        # The format begins with the begin-of-text token if the tokenizer puts it before every text.
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.begin = str(tokenizer.bos_token) if begins else ""

    def prompt(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> str:
        """Return the text before the answer: the last question and ``<|perception|>``."""
        return f"{self.begin}{messages[-1]['content']}{PERCEPTION}"

    def prompt_own(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        """Return the spans of a prompt in which special tokens are plain text: the question."""
        return ((len(self.begin), len(self.begin) + len(messages[-1]["content"])),)

    def turns(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> list[Turn]:
        """Return the last question and its answer as the only turn; special tokens in both are plain text.

        Raises ``UserError`` for a turn that has more: the format writes no thoughts, tool calls or results of tools.
        """
        _check_turn(*messages[-2:])
        index, answer = len(messages) - 1, messages[-1]["content"]
        prompt = self.prompt(messages[:-1])
        (question,), own = self.prompt_own(messages[:-1]), (len(prompt), len(prompt) + len(answer))
        spans = (*[(0, 0)] * (index - 1), question, own)
        text = prompt + answer + END_OF_TURN
        return [Turn(index, text, len(prompt), spans, (0, 0), (own,), END_OF_TURN, prompt_own=(question,))]

    def last_turn(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> Turn:
        """Return the only turn."""
        return self.turns(messages)[0]

    def render(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> Rendered:
        """Render the last question and, with ``answers``, its answer."""
        if self.answers:
            (turn,) = self.turns(messages)
            return Rendered(turn.text, turn.spans)
        (question,) = self.prompt_own(messages[:-1])
        return Rendered(
            f"{self.begin}{messages[-2]['content']}{END_OF_TURN}", (*[(0, 0)] * (len(messages) - 2), question, (0, 0))
        )

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message alone, as a view that sees nothing else: its bare content, whatever the role."""
        text = self.begin + content
        return Rendered(text, ((len(self.begin), len(text)),))

    def describe(self) -> dict[str, str]:
        """Return properties of the format, for reports."""
        parts = f"{PERCEPTION} answer {END_OF_TURN}" if self.answers else END_OF_TURN
        return {
            "form": f"plain: user {parts}",
            "end of turn": repr(END_OF_TURN),
            "begin of text": repr(self.begin) if self.begin else "none",
        }


def _check_turn(question: Message, answer: Message) -> None:
    """Raise ``UserError`` for a turn that is not a text behind a question."""
    parts = [key for key in (*REASONING_KEYS, "tool_calls") if answer.get(key)]
    if question["role"] != "user":
        parts.insert(0, f"a message of role {question['role']} in front of the answer")
    if parts:
        fault = f"the plain format writes only a question and an answer, without {parts[0]}"
        raise UserError(f"{fault}; remove it, or train with a chat template")
