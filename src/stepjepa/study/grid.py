"""Read a grid from a YAML file and expand it to a list of trials. Nothing is run or written here.

A trial is one training (settings) and its evaluation (command-line arguments) in a run folder that is named by its arm,
the chosen values and its seed: ``<arm>_lbd0.5_predictors1/seed82``.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import existing_file, read_text, read_yaml
from stepjepa.base.json_object import JsonObject
from stepjepa.config.option import typed_text

SEEDS = (82, 23, 37, 84, 4)
"""Seeds of the published experiments."""

BASELINE = "regular"
KEYS = ("train", "evaluate", "arms", "seeds", "baseline")

# Command -> flags that the sweep sets itself.
SET_BY_SWEEP = {
    "train": (
        *("output_dir", "finetune_seed", "seed", "resume_from_checkpoint", "config", "help_all", "dry_run"),
        *("json", "debug", "trust_folder"),
    ),
    "evaluate": ("model_path", "model_name", "output_file", "overwrite", "server", "server_model"),
}

Flags = JsonObject

ReadTrain = Callable[[Flags], JsonObject]
"""Returns the settings of ``RunConfig`` that flags of ``stepjepa train`` mean; UserError if they are wrong."""

ReadEvaluate = Callable[[Flags], Sequence[str]]
"""Returns flags of ``stepjepa evaluate`` as arguments; UserError if they are wrong."""


@dataclass(frozen=True)
class Grid:
    """Arms to compare. An arm's flags override shared ones; None removes a flag, a list gives one trial per value."""

    source: Path  # the file that the grid was read from
    train: Flags  # shared by all arms
    evaluate: Flags
    arms: dict[str, Flags]  # the baseline first
    seeds: tuple[int, ...]
    baseline: str
    adds_baseline: bool = False  # the file has no arm of that name


@dataclass(frozen=True)
class Trial:
    """One training and its evaluation."""

    name: str  # the run folder, <label>/seed<seed>
    arm: str
    label: str  # name of the arm and the values chosen from its lists
    seed: int
    train: JsonObject = field(hash=False)  # settings by the names of their flags, without the run folder
    evaluate: tuple[str, ...]  # arguments of the command, without model and output file


def read_grid(path: str | os.PathLike[str], seeds: Sequence[int] | None = None) -> Grid:
    """Read a grid from a YAML file; ``seeds`` override those of the file.

    Raises:
        UserError: a key or a value is not one of a grid; the error names the line.
    """
    source = existing_file(path, "grid")
    values = read_yaml(source)
    if not isinstance(values, dict):
        raise UserError(f"expected the keys {', '.join(KEYS)}", path=source)
    for key in values:
        if key not in KEYS:
            remedy = "flags of train and of evaluate stand under these two keys, those of one arm under its name"
            raise _error(source, f"unknown key; expected {', '.join(KEYS)}; {remedy}", str(key))
    arms = values.get("arms")
    if not isinstance(arms, dict) or not arms:
        raise _error(source, "expected a mapping from the names of arms to their flags", "arms")
    if not all(isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._+-]{0,63}", name) for name in arms):
        allowed = "an arm's name begins with a letter and has nothing but letters, digits and '._+-'"
        raise _error(source, allowed, "arms")
    arm_flags = {name: _flags(source, "train", flags, "arms", name) for name, flags in arms.items()}
    baseline = values.get("baseline", BASELINE)
    adds_baseline = baseline == BASELINE and BASELINE not in arm_flags
    if adds_baseline:
        arm_flags[BASELINE] = {"regular": True}
    if not isinstance(baseline, str) or baseline not in arm_flags:
        raise _error(source, f"there is no arm '{baseline}'; name one of {', '.join(arm_flags)}", "baseline")
    numbers = values.get("seeds", SEEDS) if seeds is None else seeds
    are_valid = isinstance(numbers, list | tuple) and all(map(_is_seed, numbers))
    if not are_valid or not numbers or len(set(numbers)) < len(numbers):
        fault = f"expected different whole numbers of 0 to 2**32 - 1, got {json.dumps(numbers, default=str)}"
        raise _error(source, fault, "seeds") if seeds is None else UserError(f"seeds: {fault}")
    shared = {name: _flags(source, name, values.get(name), name) for name in ("train", "evaluate")}
    ordered = {baseline: {}, **arm_flags}
    return Grid(
        source, **shared, arms=ordered, seeds=(*map(int, numbers),), baseline=baseline, adds_baseline=adds_baseline
    )


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _flags(source: Path, command: str, values: object, *keys: str) -> Flags:
    """Return flags with underscores in their names; raise ``UserError`` for one the sweep sets, or given twice."""
    if values is not None and not isinstance(values, dict):
        raise _error(source, f"holds a {type(values).__name__}; expected 'flag: value' lines", *keys)
    flags: Flags = {}
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        if name in SET_BY_SWEEP[command]:
            hint = "; write 'seeds'" if name.endswith("seed") else ""
            raise _error(source, f"is set by the sweep itself; leave it out{hint}", *keys, name)
        if name in flags:
            raise _error(source, "is set twice; leave one out", *keys, name)
        flags[name] = value
    return flags


def _error(source: Path, message: str, *keys: str) -> UserError:
    """Make an error that names the file, the path of a key and its line."""
    import yaml

    line, node = None, yaml.compose(read_text(source), Loader=yaml.SafeLoader)
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        matches = [pair for pair in pairs if str(pair[0].value).replace("-", "_") == key.replace("-", "_")]
        if not matches:
            break
        line, node = matches[-1][0].start_mark.line + 1, matches[-1][1]
    return UserError(f"{'.'.join(keys)}: {message}" if keys else message, path=source, line=line)


def expand(grid: Grid, read_train: ReadTrain, read_evaluate: ReadEvaluate) -> list[Trial]:
    """Return all trials, the baseline's first.

    Args:
        grid: the file of a sweep.
        read_train: makes the configuration of a run from its flags.
        read_evaluate: makes the arguments of an evaluation from its flags.

    Raises:
        UserError: a flag is unknown or its value wrong (file, line and key are named), or two trials would be equal.
    """
    with _errors_at(grid, (("evaluate",), grid.evaluate)):
        evaluate = tuple(read_evaluate(grid.evaluate))
    trials: list[Trial] = []
    settings: dict[str, JsonObject] = {}
    for arm, flags in grid.arms.items():
        for label, chosen in _choices(grid, arm, flags):
            added = grid.adds_baseline and arm == grid.baseline
            places = [(("train",), grid.train)] if added else [(("arms", arm), flags), (("train",), grid.train)]
            remedy = (
                f", or write it under the arms that it is for; arm '{arm}' is added as the baseline" if added else ""
            )
            with _errors_at(grid, *places, remedy=remedy):
                train = read_train({**grid.train, **chosen})
            # Some file systems ignore case.
            equal = (name for name in settings if settings[name] == train or name.casefold() == label.casefold())
            if (earlier := next(equal, None)) is not None:
                fault = f"'{label}' has the same settings as '{earlier}', or the same name; leave one out"
                raise _error(grid.source, fault, "arms", arm)
            settings[label] = train
            trials += [
                Trial(f"{label}/seed{seed}", arm, label, seed, {**train, "finetune_seed": seed}, evaluate)
                for seed in grid.seeds
            ]
    return trials


@contextmanager
def _errors_at(grid: Grid, *places: tuple[tuple[str, ...], Flags], remedy: str = "") -> Iterator[None]:
    """Add file, line and key of the flag that an error names, of the first place if it names none; and a remedy."""
    try:
        yield
    except UserError as error:
        if (keys := _list_of_values(str(error), places)) is not None:
            fault = f"takes one value, and has a list of them; {_LIST_REMEDIES[keys[0]]}"
            raise _error(grid.source, fault, *keys) from None
        words = [*re.findall(r"(?:--|`)(\w+)", str(error)), *re.findall(r"\w+", str(error))]
        uses = ((*keys, word) for word in words for keys, flags in places if word in flags)
        raise _error(grid.source, f"{error}{remedy}", *next(uses, places[0][0])) from None


_LIST_REMEDIES = {
    "train": "leave one, or write the list under the arms that it is for: there it is a grid",
    "evaluate": "leave one",
    "arms": "leave one, or the inner brackets out, so that each is a trial",
}
"""First key of a flag -> what to do about a list of values where one is taken."""


def _list_of_values(fault: str, places: Sequence[tuple[tuple[str, ...], Flags]]) -> tuple[str, ...] | None:
    """Return the keys of a list of values whose flag takes one; None if an error is of another kind.

    The parser takes the first value, and names a further one as an unknown argument.
    """
    for keys, flags in places:
        for name, value in flags.items():
            values = value if isinstance(value, list) else []
            lists = [inner for inner in values if isinstance(inner, list)] if keys[0] == "arms" else [values]
            further = [shown(typed_text(each)) for inner in lists for each in inner[1:]]
            if any(f"unknown argument {each};" in fault for each in further):
                return (*keys, name)
    return None


def _choices(grid: Grid, arm: str, arm_flags: Flags) -> Iterator[tuple[str, Flags]]:
    """Yield every combination of the values of an arm's lists, with its label."""
    axes = {name: values for name, values in arm_flags.items() if isinstance(values, list)}
    for name, values in axes.items():
        if not values:
            raise _error(grid.source, "an empty list leaves nothing to train", "arms", arm, name)
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        label = "_".join([arm, *(_name_of_value(name, value) for name, value in chosen.items())])
        yield _file_name(label, 150), {**arm_flags, **chosen}


def _name_of_value(flag: str, value: object) -> str:
    """Return a flag and its value as part of a label: ``lbd0.5``, ``labels-all``."""
    text = json.dumps(value) if isinstance(value, dict | list | bool | None) else str(value)
    is_number = re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", text)
    return f"{flag}{text}" if is_number else f"{flag}-{_file_name(text, 40)}"


def _file_name(text: str, longest: int) -> str:
    """Return a text as part of a file name; a changed or cut text ends with a digest, so that names differ."""
    clean = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")
    if clean == text and len(text) <= longest:
        return text
    return f"{clean[:longest]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def select(trials: Sequence[Trial], only: str | None) -> list[Trial]:
    """Return the trials that ``only`` names by arm, combination (``jepa_lbd0.5``), trial or seed, comma-separated.

    A trial must have one of the names, if any are listed, and one of the seeds, if any are; None selects all.

    Raises:
        UserError: no trial has one of the names.
    """
    if only is None:
        return list(trials)
    names = {name.strip() for name in only.split(",")}
    seeds = names & {str(trial.seed) for trial in trials}
    arms, names_of = names - seeds, {trial: {trial.arm, trial.label, trial.name} for trial in trials}
    if unknown := arms.difference(*names_of.values()):
        choices = ", ".join(dict.fromkeys([*(t.label for t in trials), *(str(t.seed) for t in trials)]))
        raise UserError(f"only: no arm, seed or trial is called '{min(unknown)}'; there are {choices}")
    of_seed = [trial for trial in trials if not seeds or str(trial.seed) in seeds]
    return [trial for trial in of_seed if not arms or arms & names_of[trial]]
