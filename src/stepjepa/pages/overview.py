"""What was trained: a run's configuration, data, cost and provenance; several runs side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from stepjepa.arguments import NEEDS_VIEWS, PUBLISHED_WITH_REGULAR
from stepjepa.config import JepaConfig
from stepjepa.pages.cells import NOTHING, duration, interval, magnitude, number, plain
from stepjepa.pages.markup import environment
from stepjepa.pages.material import Run
from stepjepa.pages.section import Section

# What a regular run has no use for.
_OF_VIEWS = frozenset(
    (*NEEDS_VIEWS, *PUBLISHED_WITH_REGULAR, "jepa_loss_type", "infonce_temperature", "step_separator")
)

# What tells one method from another, default or not.
_TELLING = frozenset(("mode", "layout", "predictors", "jepa_loss_type", "lbd"))

Facts = list[tuple[str, str]]

# Where a run stands and what it is called is no setting of it.
_NO_SETTING = frozenset(("output_dir", "run_name", "logging_dir"))


def overview_section(runs: Sequence[Run]) -> Section:
    """What was trained.

    Args:
        runs: at least one.
    """
    described = [
        {
            "name": run.name,
            "facts": facts(run),
            "figures": figures(run),
            "command": command(run),
            "versions": [(name, plain(value)) for name, value in (run.get("versions") or {}).items()],
            "json": json.dumps(run.run, indent=2, ensure_ascii=False),
            "notes": run.notes,
        }
        for run in runs
    ]
    columns, rows = differing(runs)
    html = (
        environment()
        .get_template("overview.html")
        .render(runs=described, side_by_side=side_by_side(runs), columns=columns, rows=rows)
    )
    return Section("overview", "What was trained", html)


def facts(run: Run) -> Facts:
    """What a run was, from the top: names and texts."""
    views = uses_views(run)
    return [
        ("Model", plain(run.get("model"))),
        ("Parameters trained", _trained(run)),
        ("Mode", _mode(run)),
        ("Layout", plain(run.get("jepa", "layout")) if views else NOTHING),
        ("Encoding", _encoding(run)),
        ("Objective", _objective(run) if views else "LM loss alone" if not run.get("jepa", "stp") else _tube(run)),
        ("Data", _data(run)),
        ("Records and pairs", _counts(run)),
        ("Tokens of training", _tokens(run)),
        ("Cost over regular", cost(run)),
        ("FLOPs of training", magnitude(run.get("results", "flops"))),
        ("Steps", _steps(run)),
        ("Seed", plain(run.get("training", "seed"))),
        ("Time of training", duration(run.get("results", "train_seconds"))),
        ("Status", plain(run.get("status"))),
    ]


def uses_views(run: Run) -> bool:
    """Whether a run aligned views of its records."""
    return run.get("jepa", "mode") not in (None, "regular")


def _mode(run: Run) -> str:
    views = f", K = {plain(run.get('jepa', 'predictors'))} predictors" if uses_views(run) else ""
    lora = run.get("lora")
    adapter = f", LoRA of rank {plain(lora.get('rank'))}" if isinstance(lora, dict) else ""
    return f"{plain(run.get('jepa', 'mode'))}{views}{adapter}"


def _objective(run: Run) -> str:
    objective = run.get("jepa")
    parts = [f"{plain(objective.get('gamma', 1.0))} × LM loss"]
    parts.append(f"{plain(objective.get('lbd'))} × {plain(objective.get('jepa_loss_type'))}")
    parts += [
        f"{plain(objective[name])} × {name}"
        for name in ("sigreg", "variance", "covariance", "stp")
        if objective.get(name)
    ]
    more = [f"target gradient {plain(objective.get('target_grad'))}"] if objective.get("target_grad") != "on" else []
    more += (
        [f"predictor head {plain(objective['predictor_head'])}"]
        if objective.get("predictor_head") not in (None, "none")
        else []
    )
    more += (
        [f"loss dropout {1 - objective['jepa_ratio']:g}"]
        if isinstance(objective.get("jepa_ratio"), float) and objective["jepa_ratio"] < 1
        else []
    )
    return ", ".join([" + ".join(parts), *more])


def _tube(run: Run) -> str:
    return f"LM loss + {plain(run.get('jepa', 'stp'))} × stp"


def _encoding(run: Run) -> str:
    found = run.get("encoding")
    if not isinstance(found, dict):
        return NOTHING
    because = found.get("because")
    return plain(found.get("used")) + (f": {because}" if isinstance(because, str) and because else "")


def _trained(run: Run) -> str:
    trained, total = (run.get("parameters", each) for each in ("trained", "total"))
    return NOTHING if trained is None else f"{number(trained)} of {number(total)}"


def _data(run: Run) -> str:
    parts = []
    for what, found in (run.get("data") or {}).items():
        if isinstance(found, dict):
            digest = found.get("sha256")
            mark = f", sha256 {digest[:12]}" if isinstance(digest, str) else ""
            parts.append(f"{what}: {plain(found.get('file'))} ({number(found.get('records'))} records{mark})")
    return "; ".join(parts) or NOTHING


def _counts(run: Run) -> str:
    counts = run.get("counts")
    if not isinstance(counts, dict):
        return NOTHING
    always = ("records", "pairs")
    return ", ".join(f"{number(value)} {name}" for name, value in counts.items() if value or name in always) or NOTHING


def _tokens(run: Run) -> str:
    return number(run.get("results", "tokens"))


def cost(run: Run) -> str:
    """Tokens of the rows to those of regular training on the same records."""
    return number(run.get("tokens", "ratio"), "× {:.2f} tokens")


def _steps(run: Run) -> str:
    training = run.get("training") or {}
    batch, gathered = training.get("per_device_train_batch_size"), training.get("gradient_accumulation_steps")
    rate, schedule = training.get("learning_rate"), training.get("lr_scheduler_type")
    size = f"{plain(batch)} records" + (f" × {plain(gathered)}" if gathered not in (None, 1) else "")
    return f"{number(run.get('results', 'steps'))}, batch of {size}, learning rate {plain(rate)} ({plain(schedule)})"


def command(run: Run) -> str | None:
    """The command line that began a run, for a shell."""
    words = run.get("command")
    return shlex.join(["stepjepa", *map(str, words)]) if isinstance(words, list) and words else None


def figures(run: Run) -> list[tuple[str, str, str]]:
    """What a run came to in a few numbers: name, value, what is to be known of it."""
    found = []
    for evaluation in run.evaluations.values():
        summary, scores = evaluation.summary, evaluation.summary["scores"]
        asked = f"{evaluation.name}, {number(summary['n'])} examples"
        found.append((summary["headline"], *_split(interval(scores[summary["headline"]])), asked))
        if summary["lenient"] != summary["headline"]:
            found.append(
                (f"{summary['lenient']} (lenient)", *_split(interval(scores[summary["lenient"]])), evaluation.name)
            )
        if "stopped" in scores:
            found.append(("stopped by itself", *_split(interval(scores["stopped"])), evaluation.name))
        found.append(("LM loss on right answers", number(summary.get("gold_loss"), "{:.3f}"), "", evaluation.name))
    found.append(("tokens over regular", number(run.get("tokens", "ratio"), "× {:.2f}"), "", ""))
    found.append(("time of training", duration(run.get("results", "train_seconds")), "", ""))
    return [(name, value, " · ".join(filter(None, more))) for name, value, *more in found if value != NOTHING]


def _split(text: str) -> tuple[str, str]:
    """A score and its interval."""
    value, _, ends = text.partition(" ")
    return value, ends


def side_by_side(runs: Sequence[Run]) -> dict[str, Any]:
    """A table with a row for each run."""
    columns = ["run", "mode", "K", "layout", "encoding", "steps", "pairs", "tokens", "over regular", "FLOPs", "time"]
    rows = []
    for run in runs:
        views = uses_views(run)
        rows.append(
            [
                run.name,
                plain(run.get("jepa", "mode")),
                plain(run.get("jepa", "predictors")) if views else NOTHING,
                plain(run.get("jepa", "layout")) if views else NOTHING,
                plain(run.get("encoding", "used")),
                number(run.get("results", "steps")),
                number(run.get("counts", "pairs")),
                _tokens(run),
                number(run.get("tokens", "ratio"), "× {:.2f}"),
                magnitude(run.get("results", "flops")),
                duration(run.get("results", "train_seconds")),
            ]
        )
    return {"columns": columns, "rows": rows}


def differing(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The settings in which runs differ.

    Args:
        runs: any number.

    Returns:
        ``run`` and the names of the settings; a row of texts for each run. No rows where nothing differs.
    """
    settings = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    defaults = {each.name: each.default for each in fields(JepaConfig)}

    def differs(name: str) -> bool:
        # What is left at its default tells nothing of a run beside others that have no use for it.
        missing = None if name in _TELLING else defaults.get(name)
        return len({plain(each.get(name, missing)) for each in settings}) > 1

    different = [name for name in names if differs(name)]
    if not different:
        return ["run"], []
    rows = [
        [run.name, *(plain(each.get(name)) for name in different)] for run, each in zip(runs, settings, strict=True)
    ]
    return ["run", *different], rows


def _settings(run: Run) -> dict[str, Any]:
    """Flat, as they are written in ``run.json``."""
    found: dict[str, Any] = {"model": run.get("model")}
    idle = frozenset() if uses_views(run) else _OF_VIEWS
    for part in ("jepa", "lora", "loaded", "training"):
        values = run.get(part)
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in _NO_SETTING and not (part == "jepa" and name in idle):
                found[f"lora {name}" if part == "lora" else name] = value
    train = run.get("data", "train", "sha256")
    found["training data"] = train[:12] if isinstance(train, str) else None
    return found
