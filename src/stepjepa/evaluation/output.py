"""The files of an evaluation: answers, appended batch by batch so that it can be resumed, and their summary."""

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from stepjepa.base.differing_values import describe_difference
from stepjepa.base.errors import UserError
from stepjepa.base.files import (
    append_jsonl,
    json_or_empty,
    naming_disk_errors,
    read_json_object,
    read_jsonl,
    write_json,
    write_jsonl,
)
from stepjepa.base.json_object import JsonObject
from stepjepa.evaluation.summary_text import MAPS
from stepjepa.store.folder import SUMMARY

Line = JsonObject

_FIELDS = {"index", "truth", "generated", "extracted", "scores", "error", "stopped", "new_tokens"}
_FIELDS |= {"gold_loss", "gold_tokens"}
_ANEW = "name another `output_file`, or pass `overwrite` to start again"


def summary_file(output: str | os.PathLike[str]) -> Path:
    """Return the path of the summary of a file of lines."""
    return Path(output).with_suffix(SUMMARY)


def meta_file(output: str | os.PathLike[str]) -> Path:
    """Return the path of the file that identifies the evaluation of a file of lines."""
    return Path(output).with_name(f"{Path(output).name}.meta.json")


def check_summary(output: str | os.PathLike[str]) -> None:
    """Raise ``UserError`` if a file of lines that is not there has a summary, which somebody has kept."""
    if (summary := summary_file(output)).exists() and not Path(output).exists():
        raise UserError(f"already exists, without the lines of {Path(output).name}; {_ANEW}", path=summary)


class OutputFile:
    """The lines of an evaluation, one JSON object for each example.

    Args:
        path: the file.
        indices: of the examples, in the order of a complete file.
        identity: the settings that must be equal to continue a file.
        overwrite: replace an existing file, once there are new lines.

    Attributes:
        done: the lines so far, by index.

    Raises:
        UserError: the file was begun with another identity, or is damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str], indices: Collection[int], identity: JsonObject, *, overwrite: bool
    ) -> None:
        self.path = Path(path)
        self.summary_file, self._meta_file = summary_file(self.path), meta_file(self.path)
        self._indices, self._identity, self._overwrite, self._begun = indices, identity, overwrite, False
        self.done: dict[int, Line] = {}
        self.read()

    def read(self) -> None:
        """Read the finished lines, unless they are to be replaced; ``UserError`` if they are of another evaluation."""
        if self._overwrite:
            return
        if not self.path.exists():
            check_summary(self.path)
            return
        self.done = {}
        if not self._meta_file.is_file():
            fault = f"is no output of an evaluation: {self._meta_file.name} is missing"
            raise UserError(f"{fault}; {_ANEW}", path=self.path)
        begun = read_json_object(self._meta_file, "file", _ANEW).get("identity") or {}
        if changed := [
            _changed(name, begun.get(name), value) for name, value in self._identity.items() if begun.get(name) != value
        ]:
            raise UserError(f"was begun with another {', '.join(changed)}; {_ANEW}", path=self.path)
        # What follows is half a line of an evaluation that was killed, or of one that is writing it now.
        whole = self.path.read_bytes().count(b"\n")

        def refuse_whole(error: UserError) -> None:
            if error.line is not None and error.line <= whole:
                raise UserError(f"{error}; remove the line, or {_ANEW}")

        for number, line in read_jsonl(self.path, on_error=refuse_whole):
            if number > whole:
                break
            index = line.get("index")
            expected = isinstance(index, int) and index in self._indices and index not in self.done
            if not expected or not line.keys() >= _FIELDS:
                raise UserError(f"is no line of this evaluation; remove it, or {_ANEW}", path=self.path, line=number)
            self.done[line["index"]] = line

    @property
    def complete(self) -> bool:
        """Whether every example has its line."""
        return len(self.done) == len(self._indices)

    def summary(self) -> JsonObject | None:
        """Return the summary of a complete file; None if there is none yet."""
        summary = json_or_empty(self.summary_file) if self.complete else {}
        return summary if summary.get("settings") == self._identity else None

    def add(self, lines: Sequence[Line]) -> None:
        """Append lines; the first call removes an old summary, and with ``overwrite`` the old file."""
        with naming_disk_errors(self.path):
            if not self._begun:
                # The summary of an incomplete file would be wrong.
                self.summary_file.unlink(missing_ok=True)
                if not self.done:
                    Path(os.path.realpath(self.path)).unlink(missing_ok=True)  # a link stays
                elif not (content := self.path.read_bytes()).endswith(b"\n"):
                    os.truncate(self.path, content.rfind(b"\n") + 1)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._meta_file, {"identity": self._identity})
                self._begun = True
            append_jsonl(self.path, lines)
        self.done |= {line["index"]: line for line in lines}

    def finish(self) -> list[Line]:
        """Write the lines in the order of the test file, and return them."""
        lines = [self.done[index] for index in self._indices]
        write_jsonl(self.path, lines)
        return lines


def _changed(name: str, before: object, now: object) -> str:
    """Name a setting that is another one now, with both values unless they are digests of files."""
    name = {"examples": "number of examples"}.get(name, name)
    digests = [isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in (before, now)]
    return name if any(digests) else describe_difference(name, before, now, "{name} ({own}, now {other})", "none")


def mean_with_interval(values: Sequence[bool | float]) -> dict[str, float | None]:
    """Return the ``mean`` of a score and ``low`` and ``high`` of Wilson's 95 % interval, None unless all are 0 or 1."""
    total = math.fsum(values)
    low = high = None
    if all(value in (0, 1) for value in values):
        from scipy.stats import binomtest

        interval = binomtest(round(total), len(values)).proportion_ci(method="wilson")
        low, high = float(interval.low), float(interval.high)
    return {"mean": total / len(values), "low": low, "high": high}


def summarise(lines: Sequence[Line], headline: str) -> JsonObject:
    """Summarise at least one line: number, means of the scores with intervals, errors by kind, losses, tokens.

    ``ran_on`` is the share of answers that were cut off at ``max_new_tokens``, ``gold_loss`` the LM loss per token of
    the right answers. A value that needs a field which a line lacks is None.
    """
    scores = {name: mean_with_interval([line["scores"][name] for line in lines]) for name in lines[0]["scores"]}
    stopped, tokens = ([line[name] for line in lines] for name in ("stopped", "new_tokens"))
    if None not in stopped:
        scores["stopped"] = mean_with_interval(stopped)
    gold_tokens = sum(line.get("gold_tokens", 0) for line in lines)
    gold = math.fsum(line["gold_loss"] * line["gold_tokens"] for line in lines) if gold_tokens else 0.0
    return {
        "n": len(lines),
        "headline": headline,
        "scores": scores,
        "errors": dict(Counter(line["error"] for line in lines if line["error"] is not None).most_common()),
        "ran_on": None if None in stopped else 1 - math.fsum(stopped) / len(lines),
        "gold_loss": gold / gold_tokens if gold_tokens else None,
        "gold_tokens": gold_tokens,
        "generated_tokens": None if None in tokens else sum(tokens),
    }


RETRIEVAL_METRICS = ("hits_at_1", "hits_at_10", "mrr", "ndcg_at_10")
"""Metrics of retrieval, see ``evaluation.retrieval.metrics``."""


def retrieval_scores(summary: JsonObject) -> dict[str, JsonObject]:
    """Return ``mean``, ``low`` and ``high`` of each metric of retrieval that was measured.

    They are named ``retrieval_hits_at_1`` and so on; behind a map of :data:`MAPS` ``linear_map_hits_at_1`` and so on.
    """
    retrieval = summary.get("retrieval") or {}
    rankings = {"retrieval": retrieval, **{name: retrieval.get(name) or {} for name in MAPS}}
    return {
        f"{name}_{metric}": ranking[metric]
        for name, ranking in rankings.items()
        for metric in RETRIEVAL_METRICS
        if metric in ranking
    }
