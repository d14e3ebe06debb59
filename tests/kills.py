"""Commands that are killed and started again, what they come to, and what may never be seen in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.store.folder import PART, checkpoint_fault, checkpoints

# What depends on the clock, or on how often the command was started.
_OF_THE_CLOCK = ("seconds", "runtime", "per_second")
_OF_THE_LAUNCH = ("launches", "command", "generated_now", "log_history", "stateful_callbacks", "resumed")


@dataclass(frozen=True)
class Case:
    """A command that can be killed: its arguments for a folder, first and after a kill, and patterns of its results."""

    name: str
    first: Callable[[Path], list[object]]
    again: Callable[[Path], list[object]]
    files: tuple[str, ...]

    def is_whole(self, folder: Path, expected: dict[str, Any]) -> bool:
        """Whether a kill came after the last change of results of a command that refuses a folder that is whole."""
        return self.name == "export" and any(folder.glob("plain/*")) and self.results(folder) == expected

    def results(self, folder: Path) -> dict[str, Any]:
        """What is to be equal, by file: bytes, or what a JSON file holds beside times."""
        result = sorted({path for pattern in self.files for path in folder.glob(pattern) if path.name[0] != "."})
        assert result, f"{self.name} left nothing"
        return {str(path.relative_to(folder)): _content(path) for path in result}


def make_material(folder: Path, tokenizer: Any) -> Path:
    """A tiny model, records to train on and to test with, in a folder."""
    tiny.make_model("llama", seed=3, attention_dropout=0.1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    records = [{"messages": list(record.messages)} for record in (tiny.records() * 19)[:19]]
    write_jsonl(folder / "train.jsonl", records)
    write_jsonl(folder / "test.jsonl", records[:11])
    return folder


def train_flags(material: Path, steps: int) -> list[object]:
    """A training with state to lose: AdamW's, dropout, loss dropout, an epoch that a checkpoint cuts."""
    flags = f"--batch_size 2 --grad_accum 2 --max_steps {steps} --learning_rate 0.01 --jepa_ratio 0.6 --lbd 0.7"
    flags += " --save_steps 2 --logging_steps 2 --save_total_limit 2 --use_cpu --step_jepa --no_cache"
    return ["--model_name", material / "model", "--train_file", material / "train.jsonl", *flags.split()]


def cases(material: Path, *, steps: int, size: int, trained: Path) -> list[Case]:
    """All commands that write for long; ``trained`` is a run folder, to be evaluated and exported."""
    test = material / "test.jsonl"

    def train(folder: Path) -> list[object]:
        return ["train", *train_flags(material, steps), "--output_dir", folder / "run"]

    def prepare(folder: Path) -> list[object]:
        return ["prepare", "stepmath", "--output_dir", folder, "--train_size", size, "--test_size", size // 3]

    def evaluate(folder: Path) -> list[object]:
        flags = ["--batch_size", 2, "--max_new_tokens", 7, "--dtype", "float32"]
        return ["evaluate", "--model_path", trained, "--test_file", test, "--output_file", folder / "a.jsonl", *flags]

    def export(folder: Path) -> list[object]:
        return ["export", "--model_path", trained, "--output_dir", folder / "plain"]

    def resume(folder: Path) -> list[object]:
        return [*train(folder), "--resume_from_checkpoint", "auto"]

    return [
        Case("train", train, resume, ("run/*.*", f"run/checkpoint-{steps}/model.safetensors")),
        Case("prepare", prepare, lambda folder: [*prepare(folder), "--overwrite"], ("*.jsonl",)),
        Case("evaluate", evaluate, evaluate, ("a.*",)),
        Case("export", export, export, ("plain/*",)),
    ]


def _content(path: Path) -> Any:
    if path.name == "training_args.bin":
        # Holds the folder's name and the time.
        return "arguments"
    if path.name == "checksums.json":
        # Among them those of files that hold times.
        return sorted(json.loads(path.read_text(encoding="utf-8")))
    if path.name == "metrics.jsonl":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        # The end of a run sums up its last launch alone.
        return [_without_times(line) for line in lines if "train_runtime" not in line]
    if path.name in ("run.json", "trainer_state.json") or path.name.endswith((".summary.json", ".meta.json")):
        return _without_times(json.loads(path.read_text(encoding="utf-8")), str(path.parents[1]))
    if path.name == "run.yaml":
        return path.read_text(encoding="utf-8").replace(str(path.parents[1]), "")
    return path.read_bytes()


def _without_times(value: Any, place: str = "") -> Any:
    if isinstance(value, dict):
        return {
            key: _without_times(inner, place)
            for key, inner in value.items()
            if key not in _OF_THE_LAUNCH and not any(word in key for word in _OF_THE_CLOCK)
        }
    if isinstance(value, list):
        return [_without_times(inner, place) for inner in value]
    return value.replace(place, "") if place and isinstance(value, str) else value


def half_files(folder: Path) -> list[str]:
    """Files with a final name that are not complete; hidden names are for what is being written."""
    complete = [checkpoint for path in folder.rglob("run.json") for checkpoint in checkpoints(path.parent)]
    wrong = [f"{path}: {fault}" for path in complete if (fault := checkpoint_fault(path, read_all=True))]
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix in (".json", ".safetensors"):
            try:
                # Opening a safetensors file compares its header with its size.
                json.loads(path.read_bytes()) if path.suffix == ".json" else safe_open(path, "np")
            except (ValueError, SafetensorError) as error:
                wrong.append(f"{path}: {error}")
    return wrong


def left_behind(folder: Path) -> list[str]:
    """Temporary folders of a killed command that its next start has not removed."""
    return [str(path) for path in folder.rglob("*") if path.name.endswith(PART)]
