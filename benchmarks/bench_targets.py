"""What the package aims at, as ratios, and whether measured rounds reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench_arms import GROUPED, REGULAR, Arm, trl_padded
from bench_table import Round, Spread, effective_ratio, fastest, row, spread

JEPA = ("llm-jepa separate, forest", "llm-jepa branched, forest", "step-jepa first, forest", "step-jepa all, forest")


class Target(NamedTuple):
    """One aim on one suite.

    Attributes:
        suite: name of the suite.
        what: the ratio, in words.
        aim: the bound; None for a ratio that is only told.
        at_least: whether the bound is the least or the most that is aimed at.
        found: the ratio, taken within each round.
    """

    suite: str
    what: str
    aim: float | None
    at_least: bool
    found: Spread

    @property
    def reached(self) -> bool | None:
        """Whether the median is on the right side of the bound; None where there is none."""
        if self.aim is None:
            return None
        return self.found.median >= self.aim if self.at_least else self.found.median <= self.aim


class _Rounds:
    """Ratios of one suite."""

    def __init__(self, suite: str, measured: dict[str, Any], batch_size: int) -> None:
        self.suite = suite
        self.arms = {arm["name"]: Arm(**arm) for arm in measured["arms"]}
        self.rounds: Sequence[Round] = measured["rounds"]
        self.plain_trl = trl_padded(batch_size)
        self.targets: list[Target] = []

    def add(
        self, what: str, aim: float | None, value: Callable[[Round], float], *needed: str, at_least: bool = True
    ) -> None:
        """Add a target unless one of the arms it needs was not measured."""
        if all(name in self.arms for name in needed):
            found = Spread.of([value(results) for results in self.rounds])
            self.targets.append(Target(self.suite, what, aim, at_least, found))

    def speed(self, name: str, other: str) -> Callable[[Round], float]:
        """Examples per second of an arm over those of another."""
        return lambda results: results[name]["examples_per_second"] / results[other]["examples_per_second"]

    def over_trl(self, names: Sequence[str], trl: Sequence[str]) -> Callable[[Round], float]:
        """Examples per second of the fastest of some arms over the fastest of some of TRL's, in each round."""
        return lambda results: fastest(results, names) / fastest(results, trl)

    def memory(self, name: str, other: str) -> Callable[[Round], float]:
        """Peak memory of an arm over that of another."""
        return lambda results: results[name]["peak_mib"] / results[other]["peak_mib"]

    def training_memory(self, name: str, other: str) -> Callable[[Round], float]:
        """The same for what training adds to what is there before it."""

        def added(run: dict[str, Any]) -> float:
            return float(run["peak_mib"] - run["baseline_mib"])

        return lambda results: added(results[name]) / max(added(results[other]), 1.0)

    def per_token(self, name: str) -> Callable[[Round], float]:
        """Time over plain fine-tuning's, divided by the ratio of tokens."""
        slower = self.speed(self.arms[name].reference, name)
        return lambda results: slower(results) / effective_ratio(results[name], self.arms[name])

    def dropout_cost(self, name: str) -> Callable[[Round], float]:
        """Time of an arm with loss dropout over plain fine-tuning's, over the most that is aimed at."""
        slower = self.speed(REGULAR, name)
        return lambda results: slower(results) / (1 + 0.27 * (results[name]["token_ratio"] - 1))


def find_targets(measured: dict[str, Any], suite: str, batch_size: int) -> list[Target]:
    """The targets that a suite has something to say about.

    Args:
        measured: of the suite, as it stands in the results file.
        suite: its name.
        batch_size: records of an optimizer step.
    """
    found = _Rounds(suite, measured, batch_size)
    _against_trl(found)
    for name in [name for name in JEPA if name in found.arms]:
        found.add(
            f"{name}: time over regular / token ratio", 1.05, found.per_token(name), name, REGULAR, at_least=False
        )
    first = "step-jepa first, forest"
    found.add(f"{first}: time over regular", 1.3, found.speed(REGULAR, first), first, REGULAR, at_least=False)
    for name in JEPA[:2]:
        for way, aim in (("padded to 512", 25.0), ("trimmed", 2.5)):
            published = f"published three rows, {way}"
            found.add(f"{name} over {published}", aim, found.speed(name, published), name, published)
    for name in ("step-jepa first", "step-jepa all"):
        both = f"{name}, forest", f"{name}, rows"
        found.add(f"{name}: forest over rows", 1.4, found.speed(*both), *both)
    for name in found.arms:
        if name.endswith("LD 0.75"):
            what = f"{name}: time over regular / (1 + 0.27 (token ratio - 1))"
            found.add(what, 1.0, found.dropout_cost(name), name, REGULAR, at_least=False)
    return found.targets


def _against_trl(found: _Rounds) -> None:
    """Best setting against best setting; and where both draw the records of a step at random, as is the default of both
    programs: to group records of like length makes a run faster and its steps other steps."""
    trl = [name for name, arm in found.arms.items() if arm.is_trl]
    at_random = [name for name in trl if found.arms[name].sampling != GROUPED]
    small = [name for name in found.arms if name.startswith(f"{REGULAR} ") and name != f"{REGULAR} grouped"]
    for name, plain, others, aim in (
        (REGULAR, REGULAR, [*small, f"{REGULAR} grouped"], 1.25),
        ("llm-jepa branched", "llm-jepa branched, forest", ["llm-jepa branched, grouped"], 1.0),
        ("llm-jepa separate", "llm-jepa separate, forest", ["llm-jepa separate, grouped"], 0.8),
    ):
        ours = [plain, *(other for other in others if other in found.arms)]
        found.add(f"{name} over TRL's regular, best settings", aim, found.over_trl(ours, trl), plain)
        what = f"{name} over TRL's regular, steps drawn at random"
        found.add(what, aim, found.over_trl([plain], at_random), plain)
    aim = 0.5 if found.suite == "vocabulary" else 0.8
    plain = found.plain_trl
    for name in (REGULAR, *JEPA):
        what = f"{name}: peak memory over that of {plain}"
        found.add(what, aim, found.memory(name, plain), name, plain, at_least=False)
        added = found.training_memory(name, plain)
        found.add(f"{what}, without what is there before training", None, added, name, plain)


def targets_table(targets: Sequence[Target]) -> str:
    """All targets as a Markdown table."""
    lines = [row(["suite", "ratio", "aim", "measured", "reached"]), row(["---"] * 5)]
    for target in targets:
        aim, reached = "–", "–"
        if target.aim is not None:
            aim, reached = f"{'≥' if target.at_least else '≤'} {target.aim:g}", "yes" if target.reached else "no"
        lines.append(row([target.suite, target.what, aim, spread(target.found._asdict(), 2), reached]))
    return "\n".join(lines)
