"""The pairs of views of a record as texts: which steps or messages they are, and how each view is rendered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepjepa.base.errors import UserError
from stepjepa.batch.view_text import PairText, ViewText, step_views
from stepjepa.chat.special_tokens import predictor_token
from stepjepa.chat.turn_text import Rendered, Turn
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.views.layouts import LAYOUTS, message_text

STEPS_IN_THOUGHT = "the last answer has too few steps, its thought has enough"
STEPS_ARE_PARAGRAPHS = "the last answer has too few steps, its paragraphs are enough"
STEPS_ARE_LINES = "the last answer has too few steps, its lines are enough"

STEP_REMEDIES = {
    STEPS_IN_THOUGHT: "`steps_from reasoning`",
    STEPS_ARE_PARAGRAPHS: "`step_separator blank`",
    STEPS_ARE_LINES: "`step_separator line`",
}
"""Reason for which a record has no pair of steps -> the setting that finds one."""


class PairRenderer:
    """Renders the pairs of records for one configuration.

    Args:
        render_alone: renders a message alone, by its role and its content.
        config: mode, layout and predictor tokens.

    Attributes:
        predictor_text: the predictor tokens as text.
    """

    def __init__(self, render_alone: Callable[[str, str], Rendered], config: JepaConfig) -> None:
        self._render_alone, self._config = render_alone, config
        self.predictor_text = "".join(predictor_token(number) for number in range(1, config.used_predictors + 1))

    def pairs(self, record: Record, turns: Sequence[Turn]) -> list[PairText]:
        """Return the pairs of a record; the first view of each predicts the second (before ``reverse_pred``).

        * Step-JEPA: steps of the last turn, each with the step ``pair_distance`` later.
        * LLM-JEPA: the record's explicit views, if it has any; else the pairs that ``partners`` of the layout picks,
          a question and its answer, if both have a text. In layouts with ``views_in_text`` the first message of
          a pair is a part of the chat; otherwise it is rendered alone.
        """
        pairs: list[PairText] = []
        if self._config.mode == "step-jepa":
            pairs = self._step_pairs(turns)
        elif self._config.mode == "llm-jepa" and record.views is not None:
            pairs = [
                PairText(0, self.alone(0, "user", source), self.alone(1, "assistant", target))
                for source, target in record.views
                if source.strip() and target.strip()
            ]
        elif self._config.mode == "llm-jepa":
            pairs = self._message_pairs(record, turns)
        return pairs[:1] if self._config.pairs == "first" else pairs

    def _step_pairs(self, turns: Sequence[Turn]) -> list[PairText]:
        """Pair the steps of the last turn, each with the step ``pair_distance`` later."""
        config, last = self._config, len(turns) - 1
        steps = step_views(turns[-1], config.step_separator, config.steps_from)
        return [PairText(last, *pair) for pair in zip(steps, steps[config.pair_distance :], strict=False)]

    def _message_pairs(self, record: Record, turns: Sequence[Turn]) -> list[PairText]:
        """Pair the messages that ``partners`` of the layout picks, if both have a text and the second one is trained.

        ``UserError`` if the layout reads the first message in its chat, and the template rewrites it there.
        """
        layout, messages = LAYOUTS[str(self._config.layout)], record.messages
        pairs: list[PairText] = []
        for start, end in layout.partners(messages):
            # The first turn that is rendered with both messages.
            number = next((n for n, turn in enumerate(turns) if turn.message >= max(start, end)), None)
            source, target = message_text(messages[start]), message_text(messages[end])
            if number is None or messages[end].get("weight", 1) == 0 or not (source and target):
                continue
            if layout.views_in_text:
                first = ViewText(turns[number], *turns[number].spans[start])
                if first.start == first.end:
                    fault = "the chat template rewrites a message, so that its content can't be found"
                    raise UserError(f"{fault}; use `layout separate`, which reads it alone")
            else:
                first = self.alone(0, messages[start]["role"], source)
            pairs.append(PairText(number, first, self.alone(1, messages[end]["role"], target)))
        # Without a chat format a record is its last exchange.
        return pairs[-1:] if self._config.plain else pairs

    def alone(self, place: int, role: str, content: str) -> ViewText:
        """Render a view as a message alone in the template.

        A source's predictors are added to the text before it is tokenised. Added to the tokens, they could end up
        behind a token that joins content and template, such as OLMo-2's ``?`` with the line end.

        Args:
            place: 0 for the first view of a pair, 1 for the second one.
            role: of the message.
            content: of the message.
        """
        # The second view is the source where it predicts the first one.
        is_source, front = place == (1 if self._config.reverse_pred else 0), self._config.front_pred
        added = self.predictor_text if is_source else ""
        alone = self._render_alone(role, added + content if front else content + added)
        start, end = alone.spans[0]
        # The record's own text; special tokens spelled in it are plain text.
        plain_span = (start + len(added), end) if front else (start, end - len(added))
        return ViewText(
            alone._replace(spans=(plain_span,)), start, end, self._config.used_predictors if is_source else 0
        )

    def reason_without_pair(self, record: Record, turns: Sequence[Turn], rendered: Sequence[PairText]) -> str:
        """Return the reason for which a record gives no pair; ``rendered`` are its pairs before truncation."""
        if rendered:
            return "its views are cut off at max_length"
        if self._config.mode == "step-jepa":
            return self._reason_without_steps(turns)
        if record.views is not None:
            return "one of its views is empty"
        exchanges = LAYOUTS[str(self._config.layout)].partners(record.messages)
        # Without a chat format a record is its last exchange.
        ordinal, place = ("last", -1) if self._config.plain else ("first", 0)
        if not exchanges:
            return "it has no question with an answer"
        question, answer = (record.messages[index] for index in exchanges[place])
        if not message_text(question):
            return "a question is empty"
        fault = "not trained" if message_text(answer) else "a tool call" if answer.get("tool_calls") else "without text"
        return f"the answer behind the {ordinal} question is {fault}"

    def _reason_without_steps(self, turns: Sequence[Turn]) -> str:
        """Return the reason for which the last turn has too few steps: the first other way in which it has enough."""
        config = self._config
        for reason, separator, part in (
            (STEPS_IN_THOUGHT, config.step_separator, "reasoning"),
            (STEPS_ARE_PARAGRAPHS, "blank", config.steps_from),
            (STEPS_ARE_LINES, "line", config.steps_from),
        ):
            if turns and len(step_views(turns[-1], separator, part)) > config.pair_distance:
                return reason
        return "the last answer has too few steps"
