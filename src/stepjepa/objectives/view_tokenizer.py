"""Bare texts and records to the tokens of one side of their pairs, for embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import json_fault
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.batch.view_text import PairText, step_views
from stepjepa.chat.marks import Message, contents, locate
from stepjepa.chat.thought import without_thought
from stepjepa.chat.tokens import Tokens
from stepjepa.chat.turn_text import Rendered, Turn
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import Record
from stepjepa.data.steps import closed_step
from stepjepa.objectives.inputs import Text
from stepjepa.views.layouts import LAYOUTS
from stepjepa.views.sequences import Kind, Pair, TokenizedRecord, View

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")

_PROBE = "\ue000p\ue001"  # private-use characters: no template writes them and no ordinary text holds them


class ViewTokenizer(RecordTokenizer):
    """Tokenises inputs of an embedder: a bare text is one view; a record of Step-JEPA gives every step.

    Args:
        tokenizer: as for ``RecordTokenizer``.
        config: settings for reading views, from ``embedding_config``.
        side: the side that is embedded.

    Attributes:
        system: the system message of training, if any; it precedes questions that are read behind a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, side: Kind) -> None:
        super().__init__(tokenizer, config)
        self.system: list[Message] = []
        self.place = int((side == "target") != config.reverse_pred)
        """0 if the side is the first view of a pair, the question; 1 if it is the second one."""
        self._frame: tuple[str, str] | None = None  # the prompt before and behind the user's text

    @property
    def open_chats(self) -> bool:
        """Whether a chat may end with its question, without an answer."""
        return self.place == 0 and self.config.mode == "llm-jepa"

    @property
    def behind_prompt(self) -> bool:
        """Whether the view is read as a part of its chat, behind the messages before it."""
        return self.place == 0 and LAYOUTS[str(self.config.layout)].views_in_text

    def pairs(self, record: Record, turns: Sequence[Turn]) -> list[PairText]:
        if self.config.mode != "step-jepa":
            return super().pairs(record, turns)
        steps = step_views(turns[-1], self.config.step_separator, self.config.steps_from)
        # Each step is paired with itself, so that the last one, which predicts none, is embedded, too.
        return [PairText(len(turns) - 1, step, step) for step in steps]

    def texts(self, texts: Sequence[Text]) -> list[TokenizedRecord]:
        """Tokenise bare texts; UserError names file and line of a text that is empty, or is no view without a chat."""
        if self.config.mode == "step-jepa" and self.place == 0:
            side = "target" if self.config.reverse_pred else "source"
            first = texts[0] if texts else Text("")
            raise UserError(
                f"a {side} view of step-jepa is a step behind its chat, so a text alone is none; pass records "
                "('messages'), or embed the other side",
                path=first.path,
                line=first.line,
            )
        views = []
        for text in texts:
            content = without_thought(text.text) if self.place == 1 else text.text
            if not content.strip():
                raise UserError("the text is empty; leave it out", path=text.path, line=text.line)
            if not content.isascii() and (fault := json_fault(content)) is not None:
                raise UserError(f"the text {fault}", path=text.path, line=text.line)
            views.append(content)
        if self.config.mode == "step-jepa":
            located = self._steps(views)
        elif self.behind_prompt:
            located = self._behind_prompt(texts, views)
        else:
            located = self._alone_in_template(texts, views)
        return [
            TokenizedRecord(view.ids, view.ids[:0], pairs=(self._pair(view),), line=text.line)
            for text, view in zip(texts, located, strict=True)
        ]

    def written(self, content: str, side: Kind) -> tuple[str, str]:
        """Render a bare text.

        Args:
            content: the text.
            side: the side that is embedded; a source has predictor tokens.

        Returns:
            The part of the rendered text before the bare text, and the bare text with its predictor tokens.
        """
        if self.behind_prompt:
            prompt, front = self._prompt(content), self.config.front_pred
            start, end = prompt.spans[-1]
            added = self.renderer.predictor_text if side == "source" else ""
            question = prompt.text[start:end]
            return prompt.text[:start], added + question if front else question + added
        view = self.renderer.alone(self.place, ("user", "assistant")[self.place], content)
        return view.text.text[: view.start], view.text.text[view.start : view.end]

    def _pair(self, view: View) -> Pair:
        """Make a pair with the view on the embedded side; its other side is never read."""
        other = view._replace(in_main=False)
        return Pair(view, other) if self.place == 0 else Pair(other, view)

    def _steps(self, texts: Sequence[str]) -> list[View]:
        """Tokenise steps alone, each closed by a separator."""
        closed = [closed_step(text, self.config.step_separator) for text in texts]
        # Without a blank in front: in training a step follows another text.
        tokens = self._texts.without_dummy_blank(closed, [((0, len(text)),) for text in closed])
        return [View(text_tokens.ids, 0, len(text_tokens.ids), in_main=True) for text_tokens in tokens]

    def _alone_in_template(self, texts: Sequence[Text], contents: Sequence[str]) -> list[View]:
        """Tokenise texts as messages alone in the template."""
        role = ("user", "assistant")[self.place]
        views = [
            self._naming(text, partial(self.renderer.alone, self.place, role, content))
            for text, content in zip(texts, contents, strict=True)
        ]
        rendered = [view.text for view in views]
        tokens = self._texts([text.text for text in rendered], [text.spans for text in rendered])
        return [view.located(text_tokens, text_tokens.ids) for view, text_tokens in zip(views, tokens, strict=True)]

    def _behind_prompt(self, texts: Sequence[Text], contents: Sequence[str]) -> list[View]:
        """Tokenise questions behind the system prompt of training."""
        prompts = [
            self._naming(text, partial(self._prompt, content)) for text, content in zip(texts, contents, strict=True)
        ]
        plain_spans = [self.template.prompt_own(self._chat(content)) for content in contents]
        tokens = self._texts([prompt.text for prompt in prompts], plain_spans)
        return [_located(text_tokens, *prompt.spans[-1]) for prompt, text_tokens in zip(prompts, tokens, strict=True)]

    def _chat(self, content: str) -> list[Message]:
        system = [] if self.config.plain else self.system
        return [*system, {"role": "user", "content": content}]

    def _prompt(self, content: str) -> Rendered:
        """Render the prompt of a question, with the span of the question in it."""
        if self._frame is None:
            probe = self.template.prompt(self._chat(_PROBE))
            before, separator, behind = probe.rpartition(_PROBE)
            self._frame = (before, behind) if separator else ("", "")
        before, behind = self._frame
        text = self.template.prompt(self._chat(content))
        for part in (content, content.strip()):
            if text == f"{before}{part}{behind}":
                return Rendered(text, ((len(before), len(before) + len(part)),))
        # The template renders something else around this text.
        chat = self._chat(content)
        span = contents(locate(self.template.prompt, chat, text, [len(chat) - 1]), len(chat))[-1]
        if span is None:
            raise UserError(
                "the chat template rewrites the text, so that it can't be found; train with `layout separate`"
            )
        return Rendered(text, (span,))

    def _naming(self, text: Text, render: Callable[[], Value]) -> Value:
        """Call ``render``; add file and line of the text to its error."""
        try:
            return render()
        except UserError as error:
            raise error.at(text.path, text.line) from None


def _located(tokens: Tokens, start: int, end: int) -> View:
    return View(tokens.ids, tokens.first_overlapping(start), tokens.first_from(end), in_main=True)
