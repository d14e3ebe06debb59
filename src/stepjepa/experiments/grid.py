"""From a grid, in a YAML file or on the command line, to the list of its trials. Nothing is run or written here.

A trial is one training and its evaluation, as two lists of flags, in a run folder whose name says what is particular
to it: ``<arm>_lbd0.5_predictors1/seed82``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.files import existing_file, read_text, read_yaml
from stepjepa.options import as_arguments

SEEDS = (82, 23, 37, 84, 4)
"""Those of the published experiments."""

BASELINE = "regular"

# What the sweep sets itself: where each trial is put, and how it is resumed.
SET_BY_SWEEP = {
    "train": ("output_dir", "finetune_seed", "seed", "resume_from_checkpoint", "config", "help_all", "dry_run"),
    "evaluate": ("model_path", "model_name", "output_file", "overwrite"),
}

KEYS = ("train", "evaluate", "arms", "seeds", "baseline")

Flags = dict[str, Any]
Check = Callable[[list[str]], Any]
"""Takes the arguments of a command, raises UserError if they are wrong, and returns what they mean, comparable."""


@dataclass(frozen=True)
class Grid:
    """Arms to compare: shared flags of ``train`` and ``evaluate``, and for each arm (the baseline first) its own.

    An arm's own flags win over the shared ones; None takes a shared one away, a list stands for each of its values.
    ``source`` and ``lines`` are the file and the lines of its keys, for errors.
    """

    train: Flags
    evaluate: Flags
    arms: dict[str, Flags]
    seeds: tuple[int, ...]
    baseline: str = BASELINE
    source: Path | None = None
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def error(self, message: str, *keys: str) -> UserError:
        """An error that names the file, the line and the path of a key."""
        where = f"{'.'.join(keys)}: " if keys else ""
        known = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        return UserError(f"{where}{message}", path=self.source, line=known if self.source else None)

    def to_dict(self) -> dict[str, Any]:
        """What was asked for, in the form of the file."""
        return {name: getattr(self, name) for name in KEYS}


@dataclass(frozen=True)
class Trial:
    """One training and its evaluation.

    ``label`` is the arm and the values chosen from its lists, ``name`` the run folder ``<label>/seed<seed>``; ``train``
    and ``evaluate`` are arguments of the commands, without run folder and output file.
    """

    name: str
    arm: str
    label: str
    seed: int
    train: tuple[str, ...]
    evaluate: tuple[str, ...]


def read_grid(path: str | os.PathLike[str], seeds: Sequence[int] | None = None) -> Grid:
    """The grid that a YAML file describes; ``seeds`` win over those of the file.

    Raises:
        UserError: the file is missing, is not YAML, names a key twice, or a key or value is not one of a grid.
    """
    import yaml

    found = existing_file(path, "grid")
    values = read_yaml(found)
    lines: dict[tuple[str, ...], int] = {}
    _note_lines(yaml.compose(read_text(found), Loader=yaml.SafeLoader), (), lines)
    if not isinstance(values, dict):
        raise UserError(f"expected the keys {', '.join(KEYS)}", path=found)
    return make_grid(values, seeds, source=found, lines=lines)


def _note_lines(node: Any, keys: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    """Collect the line of every key, flags by their names with underscores."""
    import yaml

    if isinstance(node, yaml.MappingNode) and len(keys) <= 2:
        for key, value in node.value:
            name = str(key.value)
            place = (*keys, name if keys == ("arms",) else name.replace("-", "_"))
            lines[place] = key.start_mark.line + 1
            _note_lines(value, place, lines)


def make_grid(
    values: Mapping[str, Any],
    seeds: Sequence[int] | None = None,
    *,
    source: Path | None = None,
    lines: Mapping[tuple[str, ...], int] | None = None,
) -> Grid:
    """A grid from a mapping of the form of the YAML file; see :func:`read_grid`."""
    place = Grid({}, {}, {}, (), source=source, lines=lines or {})
    for key in values:
        if key not in KEYS:
            raise place.error(f"unknown key; expected {', '.join(KEYS)}", str(key))
    train = _flags(place, "train", values.get("train"), ("train",))
    evaluate = _flags(place, "evaluate", values.get("evaluate"), ("evaluate",))
    arms = values.get("arms")
    if not isinstance(arms, dict) or not arms:
        raise place.error("expected a mapping from the names of arms to their flags", "arms")
    for name in arms:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9._+-]{0,63}", name):
            raise place.error(
                "an arm's name begins with a letter and has nothing but letters, digits and '._+-'", "arms"
            )
    own = {name: _flags(place, "train", flags, ("arms", name)) for name, flags in arms.items()}
    baseline = values.get("baseline", BASELINE)
    if baseline == BASELINE and BASELINE not in own:
        own[BASELINE] = {"regular": True}
    if not isinstance(baseline, str) or baseline not in own:
        raise place.error(f"there is no arm '{baseline}'; name one of {', '.join(own)}", "baseline")
    own = {baseline: own[baseline], **own}
    numbers = _seeds(place, values.get("seeds", SEEDS) if seeds is None else seeds)
    return Grid(train, evaluate, own, numbers, baseline, source, lines or {})


def _flags(place: Grid, command: str, values: Any, keys: tuple[str, ...]) -> Flags:
    """Flags by their names with underscores."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise place.error(f"holds a {type(values).__name__}; expected 'flag: value' lines", *keys)
    flags: Flags = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in SET_BY_SWEEP[command]:
            hint = "; write 'seeds'" if name.endswith("seed") else ""
            raise place.error(f"is set by the sweep itself; leave it out{hint}", *keys, str(key))
        if name in flags:
            raise place.error("is there twice", *keys, str(key))
        flags[name] = value
    return flags


def _seeds(place: Grid, values: Any) -> tuple[int, ...]:
    whole = isinstance(values, list | tuple) and all(type(value) is int and value >= 0 for value in values)
    if not whole or not values or len(set(values)) < len(values):
        raise place.error(
            f"expected different whole numbers, 0 or more, got {json.dumps(values, default=str)}", "seeds"
        )
    return tuple(values)


def expand(grid: Grid, check_train: Check, check_evaluate: Check) -> list[Trial]:
    """All trials, the baseline's first; the checks are those of the arguments of both commands.

    Raises:
        UserError: a flag is unknown or its value wrong (file, line and key are named), or two trials would be equal.
    """
    evaluate = as_arguments(grid.evaluate)
    with _errors_at(grid, [(("evaluate",), grid.evaluate)]):
        check_evaluate(evaluate)
    trials: list[Trial] = []
    meanings: list[tuple[str, Any]] = []
    for arm, own in grid.arms.items():
        for label, chosen in _choices(grid, arm, own):
            train = as_arguments({**grid.train, **chosen})
            with _errors_at(grid, [(("arms", arm), own), (("train",), grid.train)]):
                meaning = check_train(train)
            same = next((earlier for earlier, known in meanings if known == meaning), None)
            if same is not None:
                raise grid.error(f"'{label}' would train the same as '{same}'; leave one out", "arms", arm)
            if any(label.casefold() == earlier.casefold() for earlier, _ in meanings):
                raise grid.error(f"two combinations would be called '{label}'; rename the arm", "arms", arm)
            meanings.append((label, meaning))
            for seed in grid.seeds:
                arguments = (*train, f"--finetune_seed={seed}")
                trials.append(Trial(f"{label}/seed{seed}", arm, label, seed, arguments, tuple(evaluate)))
    return trials


@contextmanager
def _errors_at(grid: Grid, places: list[tuple[tuple[str, ...], Flags]]) -> Iterator[None]:
    """Put the place of a flag's key into errors about it; into others the first place."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for name in [*re.findall(r"--(\w+)", message), *re.findall(r"\w+", message)]:
            for keys, flags in places:
                if name in flags:
                    raise grid.error(message, *keys, name) from None
        raise grid.error(message, *places[0][0]) from None


def _choices(grid: Grid, arm: str, own: Flags) -> Iterator[tuple[str, Flags]]:
    """Every combination of the values of an arm's lists, with the name that says which it is."""
    axes = {name: values for name, values in own.items() if isinstance(values, list)}
    for name, values in axes.items():
        if not values:
            raise grid.error("an empty list leaves nothing to train", "arms", arm, name)
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        label = "_".join([arm, *(_name_of_value(name, value) for name, value in chosen.items())])
        yield _file_name(label, 150), {**own, **chosen}


def _name_of_value(flag: str, value: Any) -> str:
    """``lbd0.5``, ``labels-all``."""
    text = json.dumps(value) if isinstance(value, dict | list | bool | None) else str(value)
    is_number = re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", text)
    return f"{flag}{text}" if is_number else f"{flag}-{_file_name(text, 40)}"


def _file_name(text: str, longest: int) -> str:
    """A text as part of a file name; what is changed or cut is replaced by a digest, so that names differ."""
    clean = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")
    if clean == text and len(text) <= longest:
        return text
    return f"{clean[:longest]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def select(trials: Sequence[Trial], only: str | None) -> list[Trial]:
    """The trials that ``--only`` names by arm, combination (``jepa_lbd0.5``), trial or seed, divided by commas.

    Several names of one kind widen the choice, an arm and a seed together narrow it; None takes all.

    Raises:
        UserError: a name is that of none.
    """
    if only is None:
        return list(trials)
    names = {name.strip() for name in only.split(",")}
    seeds = {str(trial.seed) for trial in trials} & names
    arms = {name for trial in trials for name in (trial.arm, trial.label)} & names
    whole = {trial.name for trial in trials} & names
    if unknown := names - seeds - arms - whole:
        there = ", ".join(dict.fromkeys([*(t.label for t in trials), *(str(t.seed) for t in trials)]))
        raise UserError(f"--only: no arm, seed or trial is called '{min(unknown)}'; there are {there}")
    return [
        trial
        for trial in trials
        if trial.name in whole
        or (
            (seeds or arms)
            and (not seeds or str(trial.seed) in seeds)
            and (not arms or {trial.arm, trial.label} & arms)
        )
    ]
