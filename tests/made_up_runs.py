"""Run folders with evaluations in them, written without training: for tests of what is made of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepjepa.base.files import write_json, write_jsonl
from stepjepa.config.jepa import JepaConfig
from stepjepa.evaluation.output import RETRIEVAL_METRICS, summarise
from stepjepa.store.fingerprint import model_fingerprint
from stepjepa.store.folder import RUN_FILE

PROTOCOL = {
    "test_file": "f" * 64,
    "examples": 4,
    "task": "generic",
    "task_options": {},
    "scoring": "own",
    "headline": "exact",
    "prompt": {"system": "Add.", "plain": False},
    "max_new_tokens": 16,
    "temperature": 0.0,
    "num_samples": 1,
    "engine": "hf",
    "dtype": "auto",
    "base_model": None,
    "similarity": None,
    "seed": None,
    "batch_size": None,
}


def verdicts(text: str) -> list[bool]:
    """``"110"`` is right, right, wrong."""
    return [sign == "1" for sign in text]


def make_run(
    folder: Path,
    right: str,
    *,
    seed: int = 1,
    lenient: str | None = None,
    stopped: str | None = None,
    jepa: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    steps: int = 10,
    tokens: float = 1000.0,
    flops: float | None = None,
    **parts: Any,
) -> Path:
    """Write a finished run and its evaluation.

    ``right``, ``lenient`` and ``stopped`` say of each example whether it is right, right by the lenient score, and
    whether the model stopped (see :func:`verdicts`); ``jepa`` and ``training`` are changes to the settings, ``parts``
    to other parts of ``run.json``; without ``flops`` the run has none, as those of older versions.
    """
    arguments = {"output_dir": str(folder), "learning_rate": 2e-5, "per_device_train_batch_size": 4, "max_steps": -1}
    arguments |= {"gradient_accumulation_steps": 2, "num_train_epochs": 3.0, "seed": seed, "data_seed": None}
    run = {
        "status": "finished",
        "model": "preset:tiny",
        "jepa": JepaConfig(**(jepa or {"mode": "regular"})).to_dict(),
        "lora": None,
        "training": {**arguments, "logging_steps": seed, "save_strategy": "no", **(training or {})},
        "data": {"train": {"file": "train.jsonl", "records": 9, "sha256": "d" * 64}},
        "order": {"seed": seed, "records_per_micro_step": 4},
        "system_prompts": ["Add."],
        "versions": {"stepjepa": "0.1.0", "platform": str(folder)},
        "results": {"steps": steps, "tokens": tokens, "train_seconds": 2.5},
        **parts,
    }
    if flops is not None:
        run["results"]["flops"] = flops
    folder.mkdir(parents=True)
    write_json(folder / RUN_FILE, run)
    (folder / "model.safetensors").write_text(str(folder))
    evaluate(folder, right, lenient=lenient, stopped=stopped)
    return folder


def evaluate(
    folder: Path, right: str, *, lenient: str | None = None, stopped: str | None = None, name: str = "test"
) -> None:
    """Write an evaluation into a run folder, as :func:`make_run` does."""
    columns = [verdicts(right), verdicts(lenient or right), verdicts(stopped or "1" * len(right))]
    lines = [
        {
            "index": index,
            "scores": {"exact": exact, "prefix": prefix},
            "error": None if exact else "wrong answer",
            "stopped": ended,
            "new_tokens": 3,
            "gold_loss": 0.5,
            "gold_tokens": 2,
        }
        for index, (exact, prefix, ended) in enumerate(zip(*columns, strict=True))
    ]
    write_jsonl(folder / f"{name}.jsonl", lines)
    summary = {
        "model_path": str(folder),
        "test_file": "test.jsonl",
        "test_fingerprint": "f" * 64,
        "task": "generic",
        "lenient": "prefix",
        **summarise(lines, "exact"),
        "similarity": {"matched_similarity": 0.75, "shuffled_similarity": 0.25},
        "settings": {**PROTOCOL, "examples": len(lines), "model": model_fingerprint(folder)},
    }
    write_json(folder / f"{name}.summary.json", summary)


def change(file: Path, *path: str, to: Any) -> None:
    """Put another value at a place in a JSON file."""
    value = json.loads(file.read_text(encoding="utf-8"))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    write_json(file, value)


def retrieve(
    folder: Path,
    hits: float,
    layer: int = -1,
    *,
    name: str = "test",
    behind_map: float | None = None,
    behind_heads: float | None = None,
) -> None:
    """Put retrieval into the summary of an evaluation: hits at 1 as given, the other metrics a tenth higher each.

    With ``behind_map`` every metric behind a linear map is that, with ``behind_heads`` every one behind heads.
    """
    means = [round(hits + number / 10, 6) for number in range(len(RETRIEVAL_METRICS))]
    scores = {
        each: {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
        for each, mean in zip(RETRIEVAL_METRICS, means, strict=True)
    }
    readout = {"views": "llm-jepa", "layer": layer, "pooling": "last"}
    fitted = {
        "file": "known.jsonl",
        "left_out": 0,
        "every_layer": True,
        "queries": 11,
        "candidates": 7,
        "readout": {**readout, "layer": 3},
    }
    maps: dict[str, tuple[float | None, dict[str, Any]]] = {
        "linear_map": (behind_map, {"records": 31, "fit": "ridge", "penalty": 0.01}),
        "projection_heads": (behind_heads, {"records": 29, "epochs": 15, "all_layers": True}),
    }
    mapped = {
        of_map: {**fitted, **facts, **{each: {"mean": mean, "low": mean, "high": mean} for each in RETRIEVAL_METRICS}}
        for of_map, (mean, facts) in maps.items()
        if mean is not None
    }
    counts = {"queries": 11, "candidates": 7, "readout": readout, "equal_text_only": None}
    change(folder / f"{name}.summary.json", "retrieval", to={**counts, **scores, **mapped})


STEP_JEPA = {"mode": "step-jepa", "predictors": 2, "lbd": 0.5}
"""Fields of ``JepaConfig`` of a run with views."""


def log(folder: Path, count: int = 5, *, views: bool = False, **more: Any) -> None:
    """Write ``metrics.jsonl`` into a run folder: losses that fall as 12 / step, and what is named."""
    own = {"jepa_loss": 0.25, "matched_similarity": 0.75, "shuffled_similarity": 0.5, "source_rank": 3.0}
    lines = [
        {
            "step": 7 * number,
            "epoch": number,
            "loss": 13 / number,
            "lm_loss": 12 / number,
            **(own if views else {}),
            **more,
        }
        for number in range(1, count + 1)
    ]
    write_jsonl(folder / "metrics.jsonl", lines)
