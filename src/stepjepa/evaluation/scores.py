"""The scores of an evaluation, as ``stepjepa.evaluate`` returns them."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepjepa.base.files import read_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.evaluation.output import retrieval_scores
from stepjepa.evaluation.summary_text import format_summary


@dataclass(frozen=True, repr=False)
class Scores(Mapping[str, float]):
    """The scores of a model on a test file: a mapping of their names to their means, so that ``dict(scores)`` works.

    Attributes:
        file: JSON lines, one for each record: answers, their scores, lengths.
        summary: the contents of ``NAME.summary.json``: mean and interval of each score, costs, settings.

    Example:
        >>> scores = evaluate("runs/a", "test.jsonl", max_new_tokens=64)
        >>> scores["exact"], scores.headline
    """

    file: Path
    summary: JsonObject

    @property
    def headline(self) -> str:
        """The name of the score that decides whether an answer is right."""
        return str(self.summary["headline"])

    @property
    def names(self) -> list[str]:
        """The names of all scores, and of the metrics of retrieval if they were measured."""
        return [*self._scores]

    @property
    def _scores(self) -> dict[str, JsonObject]:
        return {**self.summary["scores"], **retrieval_scores(self.summary)}

    @property
    def lines(self) -> list[JsonObject]:
        """The lines of the file; read each time."""
        return [line for _, line in read_jsonl(self.file)]

    def __getitem__(self, name: str) -> float:
        """Return the mean of a score over all records, or of ``retrieval_hits_at_1``,
        ``linear_map_hits_at_1``, ``projection_heads_hits_at_1`` and the like over all queries.

        ``KeyError`` names the scores that exist.
        """
        if name not in self._scores:
            raise KeyError(f"no score '{name}'; there are {', '.join(self.names)}")
        return float(self._scores[name]["mean"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def __repr__(self) -> str:
        return f"Scores({self.headline} {self[self.headline]:.4f} of {self.summary['n']} records, '{self.file}')"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(format_summary(self.summary, details=True))}</pre>"
