"""Figures of evaluated runs in one JSON file, without weights or answers: small enough to be committed.

A file holds all that a comparison needs, so that tables and tests are made from it as from the run folders.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stepjepa.base.errors import UserError
from stepjepa.base.files import read_json_object, write_json
from stepjepa.store.folder import SUMMARY
from stepjepa.store.record import Fingerprints
from stepjepa.study.evaluated_run import EvaluatedRun, read_evaluated_run

FORMAT = "stepjepa figures 1"

# Kept once for all runs of an arm, and once for all runs of a protocol.
_OF_ARM, _OF_ALL = "settings", ("protocol", "versions", "loaded")


@dataclass(frozen=True)
class Figures:
    """One run.

    Attributes:
        label: of its arm.
        run: what a comparison needs.
        scores: the mean of every score of the evaluation, by name.
        similarity: similarities and effective ranks of the views; empty if they were not measured.
    """

    label: str
    run: EvaluatedRun
    scores: dict[str, float]
    similarity: dict[str, float]

    @property
    def key(self) -> tuple[str, str]:
        """Label and seed, which name a run in a file."""
        return self.label, self.run.seed


def from_folder(folder: str | os.PathLike[str], label: str, evaluation: str) -> Figures:
    """The figures of an evaluated run.

    Args:
        folder: of the run.
        label: of its arm.
        evaluation: name of the evaluation in it.

    Raises:
        UserError: see :func:`read_evaluated_run`.
    """
    run = read_evaluated_run(folder, evaluation)
    summary = read_json_object(run.folder / f"{run.evaluation}{SUMMARY}", "summary", "evaluate again")
    numbers = {name: value for name, value in (summary.get("similarity") or {}).items() if isinstance(value, float)}
    return Figures(label, run, {name: score["mean"] for name, score in summary["scores"].items()}, numbers)


def write_figures(path: str | os.PathLike[str], figures: Sequence[Figures]) -> None:
    """Write a file, by label and seed.

    Args:
        path: of the file, which is replaced.
        figures: of all runs.

    Raises:
        ValueError: an arm has a seed twice, or settings that differ.
    """
    common: list[dict[str, Any]] = []
    arms: dict[str, Any] = {}
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for each in sorted(figures, key=lambda each: (each.label, [int(part) for part in each.run.seed.split("/")])):
        if each.key in runs:
            raise ValueError(f"expected one run of each arm and seed, got two of {each.label}, seed {each.run.seed}")
        values = {field.name: getattr(each.run, field.name) for field in fields(EvaluatedRun)}
        settings = values.pop(_OF_ARM)
        recorded = arms.setdefault(each.label, settings)
        # Another version may know other settings.
        if any(recorded[name] != settings[name] for name in recorded.keys() & settings.keys()):
            raise ValueError(
                f"expected equal settings in all runs of {each.label}, got others for seed {each.run.seed}"
            )
        shared = {name: values.pop(name) for name in _OF_ALL}
        if shared not in common:
            common.append(shared)
        # Files of earlier versions have no fingerprints.
        digests = asdict(values.pop("fingerprints"))
        fingerprints = {name: digest for name, digest in digests.items() if digest is not None}
        launches = {name: list(values.pop(name)) for name in ("mixed", "noted")}
        values |= {"fingerprints": fingerprints} if fingerprints else {}
        values |= {name: changes for name, changes in launches.items() if changes}
        values |= {
            # A path of this machine says nothing elsewhere.
            "folder": f"{each.label}/seed{each.run.seed}",
            "indices": _pack_indices(values["indices"]),
            "examples": {name: _pack(marks) for name, marks in values["examples"].items()},
        }
        about = {
            "arm": each.label,
            "common": common.index(shared),
            "scores": each.scores,
            "similarity": each.similarity,
        }
        runs[each.key] = {**about, **values}
    write_json(Path(path), {"format": FORMAT, "common": common, "arms": arms, "runs": list(runs.values())})


def read_figures(path: str | os.PathLike[str]) -> list[Figures]:
    """Read what :func:`write_figures` wrote.

    Raises:
        UserError: there is no such file, or it is another one.
    """
    file = Path(path)
    content = read_json_object(file, "file of figures", "make it again")
    if content.get("format") != FORMAT:
        raise UserError(f"is no file of figures ('{FORMAT}'); name one that was made from run folders", path=file)
    try:
        return [_unpack_run(content, dict(each)) for each in content["runs"]]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"is damaged ({type(error).__name__}: {error}); make it again", path=file) from None


def _unpack_run(content: dict[str, Any], values: dict[str, Any]) -> Figures:
    label = values.pop("arm")
    scores, similarity = values.pop("scores"), values.pop("similarity")
    values |= content["common"][values.pop("common")]
    values["fingerprints"] = Fingerprints(**values.get("fingerprints", {}))
    values |= {name: tuple(values.get(name, ())) for name in ("mixed", "noted")}
    indices = values["indices"]
    count = indices if isinstance(indices, int) else len(indices)
    values |= {
        _OF_ARM: content["arms"][label],
        "folder": Path(values["folder"]),
        "indices": list(range(count)) if isinstance(indices, int) else indices,
        "examples": {name: _unpack(packed, count) for name, packed in values["examples"].items()},
    }
    return Figures(label, EvaluatedRun(**values), scores, similarity)


def _pack_indices(indices: list[int]) -> int | list[int]:
    return len(indices) if indices == list(range(len(indices))) else indices


def _pack(values: list[float] | None) -> str | list[float] | None:
    """Rights and wrongs as hexadecimal digits, the first example in the highest bit; other scores as they are."""
    if values is None or not all(value in (0, 1) for value in values):
        return values
    bits = "".join(str(int(value)) for value in values)
    return f"{int(bits, 2):0{-(-len(bits) // 4)}x}" if bits else ""


def _unpack(packed: str | list[float] | None, count: int) -> list[float] | None:
    if not isinstance(packed, str):
        return packed
    bits = f"{int(packed or '0', 16):0{count}b}" if count else ""
    if len(bits) != count:
        raise ValueError(f"expected {count} examples, got {len(bits)}")
    return [float(bit) for bit in bits]
