"""What was trained: settings, data, cost and versions of each run; several runs side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from stepjepa.arguments import NEEDS_VIEWS, PUBLISHED_WITH_REGULAR
from stepjepa.config import JepaConfig
from stepjepa.pages.render import UNKNOWN, Section, duration, magnitude, number, plain, render
from stepjepa.pages.runs import Run

# Settings that a regular run has no use for.
_OF_VIEWS = frozenset(
    (*NEEDS_VIEWS, *PUBLISHED_WITH_REGULAR, "jepa_loss_type", "infonce_temperature", "step_separator")
)
# Settings that tell methods apart, at their defaults too.
_METHOD = frozenset(("mode", "layout", "predictors", "jepa_loss_type", "lbd"))
# Arguments that change nothing of the result.
_IGNORED = frozenset(("output_dir", "run_name", "logging_dir"))


# Facts that several runs are shown by in one table.
_SIDE_BY_SIDE = (
    *("Mode", "Encoding", "Steps", "Tokens of training"),
    *("Cost over regular", "FLOPs of training", "Time of training"),
)


def overview_section(runs: Sequence[Run]) -> Section:
    """What was trained, in at least one run."""
    described: list[dict[str, Any]] = [
        {
            "name": run.name,
            "facts": facts(run),
            "command": _command(run),
            "versions": run.get("versions") or {},
            "json": json.dumps(run.run, indent=2, ensure_ascii=False),
            "notes": run.notes,
        }
        for run in runs
    ]
    rows = [
        [run.name, *(each["facts"][name] for name in _SIDE_BY_SIDE)] for run, each in zip(runs, described, strict=True)
    ]
    side_by_side = ["run", *_SIDE_BY_SIDE], rows
    html = render("overview.html", runs=described, side_by_side=side_by_side, differing=differing(runs))
    return Section("overview", "What was trained", html)


def facts(run: Run) -> dict[str, str]:
    """Names and texts about a run."""
    mode = plain(run.get("jepa", "mode"))
    if run.uses_views:
        mode += f", K = {plain(run.get('jepa', 'predictors'))} predictors, layout {plain(run.get('jepa', 'layout'))}"
    if run.get("lora", "rank") is not None:
        mode += f", LoRA of rank {plain(run.get('lora', 'rank'))}"
    because = run.get("encoding", "because")
    counts = run.get("counts")
    data = run.get("data")
    files = [
        f"{part}: {plain(found.get('file'))} ({number(found.get('records'))} records, "
        f"sha256 {plain(found.get('sha256'))[:12]})"
        for part, found in (data.items() if isinstance(data, dict) else ())
        if isinstance(found, dict)
    ]
    return {
        "Model": plain(run.get("model")),
        "Parameters trained": f"{number(run.get('parameters', 'trained'))} of {number(run.get('parameters', 'total'))}",
        "Mode": mode,
        "Encoding": plain(run.get("encoding", "used")) + (f": {because}" if isinstance(because, str) else ""),
        "Objective": _objective(run),
        "Data": "; ".join(files) or UNKNOWN,
        "Records and pairs": ", ".join(f"{number(value)} {name}" for name, value in counts.items() if value)
        if isinstance(counts, dict)
        else UNKNOWN,
        "Tokens of training": number(run.get("results", "tokens")),
        "Cost over regular": number(run.get("tokens", "ratio"), "× {:.2f} tokens"),
        "FLOPs of training": magnitude(run.get("results", "flops")),
        "Steps": number(run.get("results", "steps")),
        "Batch": f"{plain(run.get('training', 'per_device_train_batch_size'))} records × "
        f"{plain(run.get('training', 'gradient_accumulation_steps'))}",
        "Learning rate": f"{plain(run.get('training', 'learning_rate'))} "
        f"({plain(run.get('training', 'lr_scheduler_type'))})",
        "Seed": plain(run.get("training", "seed")),
        "Time of training": duration(run.get("results", "train_seconds")),
        "Status": plain(run.get("status")),
    }


def _objective(run: Run) -> str:
    """The weighted terms of the loss, and what changes how they are computed."""
    jepa = run.get("jepa")
    if not isinstance(jepa, dict):
        return UNKNOWN
    weights = {"LM loss": jepa.get("gamma", 1.0)}
    if run.uses_views:
        weights[plain(jepa.get("jepa_loss_type"))] = jepa.get("lbd")
    weights |= {name: jepa[name] for name in ("sigreg", "variance", "covariance", "stp") if jepa.get(name)}
    parts = [" + ".join(f"{plain(weight)} × {name}" for name, weight in weights.items())]
    if run.uses_views and jepa.get("target_grad") != "on":
        parts.append(f"target gradient {plain(jepa.get('target_grad'))}")
    if jepa.get("predictor_head") not in (None, "none"):
        parts.append(f"predictor head {plain(jepa['predictor_head'])}")
    if isinstance(jepa.get("jepa_ratio"), float) and jepa["jepa_ratio"] < 1:
        parts.append(f"loss dropout {1 - jepa['jepa_ratio']:g}")
    return ", ".join(parts)


def _command(run: Run) -> str | None:
    """The command line that started a run, quoted for a shell."""
    arguments = run.get("command")
    return shlex.join(["stepjepa", *map(str, arguments)]) if isinstance(arguments, list) and arguments else None


def differing(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the settings in which runs differ; no further columns than ``run`` where nothing differs."""
    settings = [_settings(run) for run in runs]
    # A run that lacks a setting has it at its default, unless it tells methods apart.
    defaults = {each.name: each.default for each in fields(JepaConfig) if each.name not in _METHOD}
    names = [
        name
        for name in dict.fromkeys(name for each in settings for name in each)
        if len({plain(each.get(name, defaults.get(name))) for each in settings}) > 1
    ]
    rows = [[run.name, *(plain(each.get(name)) for name in names)] for run, each in zip(runs, settings, strict=True)]
    return ["run", *names], rows


def _settings(run: Run) -> dict[str, Any]:
    """All settings that ``run.json`` holds, in one dictionary."""
    found: dict[str, Any] = {"model": run.get("model")}
    unused = _IGNORED if run.uses_views else _IGNORED | _OF_VIEWS
    for part in ("jepa", "lora", "loaded", "training"):
        values = run.get(part)
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in unused:
                found[f"lora {name}" if part == "lora" else name] = value
    found["training data"] = plain(run.get("data", "train", "sha256"))[:12]
    return found
