"""Commands that take a model and data name what is wrong with the model before they read the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.files import write_json
from stepjepa.cli.main import main

BASE = {
    "train": ["--model_name", "MODEL", "--train_file", "DATA", "--output_dir", "OUT"],
    "train --dry_run": ["--model_name", "MODEL", "--train_file", "DATA", "--output_dir", "OUT"],
    "estimate": ["--model_name", "MODEL", "--train_file", "DATA"],
    "inspect": ["--model_name", "MODEL", "--train_file", "DATA"],
    "verify": ["--model_name", "MODEL", "--train_file", "DATA"],
}
TRAINED = {
    "evaluate": ["--model_path", "MODEL", "--test_file", "DATA", "--output_file", "OUT.jsonl"],
    "analyze": ["--model_path", "MODEL", "--test_file", "DATA", "--output_dir", "OUT"],
    "embed": ["--model_path", "MODEL", "--input_file", "DATA", "--output_file", "OUT.npy"],
    "search": ["--model_path", "MODEL", "--corpus", "DATA", "--query", "Why?"],
    "search by file": ["--model_path", "MODEL", "--corpus", "DATA", "--queries", "DATA"],
}
COMMANDS = BASE | TRAINED


def run(name: str, model: object, data: Path, out: Path, *flags: str) -> int:
    first, *more = name.replace(" by file", "").split()
    values = {"MODEL": str(model), "DATA": str(data), "OUT": str(out)}
    arguments = [values.get(word, word.replace("OUT", str(out))) for word in COMMANDS[name]]
    return int(main([first, *more, *arguments, *flags]))


@pytest.fixture
def material(tmp_path: Path) -> Path:
    """Folders without a model, and ``data.jsonl``, which any reading would call broken."""
    (tmp_path / "data.jsonl").write_text("{broken\n")
    (tmp_path / "weights.bin").write_text("")
    (tmp_path / "empty").mkdir()
    for number in ("9", "10", "x"):
        (tmp_path / "stopped" / f"checkpoint-{number}").mkdir(parents=True)
    write_json(tmp_path / "adapter" / "adapter_config.json", {"base_model_name_or_path": "nowhere/at/all"})
    write_json(tmp_path / "run" / "config.json", {"model_type": "llama"})
    return tmp_path


FAULTS = [
    ("nowhere/at/all", "nowhere/at/all: no such model folder; check the path"),
    ("weights.bin", "weights.bin: is a file; name the folder of a model"),
    ("empty", "empty: holds no model; name the folder of a finished run, or of a checkpoint"),
    ("stopped", "stopped: holds no model; its run was stopped, or still trains: name the last checkpoint, "),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_wrong_with_the_model_comes_first(name: str, material: Path, capsys: Any) -> None:
    faults = [*FAULTS]
    if name in BASE:
        faults += [("adapter", "adapter: is an adapter; training starts from a whole model: run 'stepjepa export'")]
        faults += [("preset:tinny", "no preset 'tinny'; choose one of preset:tiny, ")]
    else:
        faults += [("preset:tiny", "preset:tiny: a preset has random weights; name a trained model")]
        missing = (
            "adapter_config.json: names the base model 'nowhere/at/all', and there is no such folder; start in the "
        )
        faults += [("adapter", missing)]
    for model, message in faults:
        path = model if ":" in model or model.startswith("nowhere") else material / model
        assert run(name, path, material / "data.jsonl", material / "out") == 2
        shown = capsys.readouterr().err
        assert message in shown and len(shown.splitlines()) == 1
    assert shown and not (material / "out").exists()


def test_the_newest_checkpoint_of_a_stopped_run_is_named(material: Path, capsys: Any) -> None:
    assert run("evaluate", material / "stopped", material / "data.jsonl", material / "out") == 2
    newest = material / "stopped" / "checkpoint-10"
    assert capsys.readouterr().err.strip().endswith(f"name the last checkpoint, {newest}")


@pytest.mark.parametrize("name", ["embed", "search", "search by file"])
def test_a_model_without_an_objective_is_refused_before_the_texts(name: str, material: Path, capsys: Any) -> None:
    assert run(name, material / "run", material / "data.jsonl", material / "out") == 2
    assert "no JEPA objective, which would say where its embeddings are read; pass --pooling mean (" in (
        shown := capsys.readouterr().err
    )
    assert len(shown.splitlines()) == 1


def test_similarity_of_a_model_without_a_record_is_refused_before_the_records(material: Path, capsys: Any) -> None:
    assert run("evaluate", material / "run", material / "data.jsonl", material / "out", "--similarity") == 2
    assert "run: is no run folder (no run.json that says how the model was trained)" in capsys.readouterr().err


def test_a_missing_file_is_named_before_another_is_read(material: Path, capsys: Any) -> None:
    data, flags = material / "data.jsonl", ["--eval_file", str(material / "no.jsonl")]
    assert run("train", "preset:tiny", data, material / "out", *flags) == 2
    assert "no.jsonl: no such data file; check the path" in capsys.readouterr().err
    mixed = ["--dataset", str(data), str(material / "no.jsonl"), "--output_dir", str(material / "out")]
    assert main(["train", "--model_name", "preset:tiny", *mixed]) == 2
    assert "no.jsonl: no such data file; check the path" in capsys.readouterr().err
