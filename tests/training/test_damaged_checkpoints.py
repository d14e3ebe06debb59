"""Checkpoints whose files are whole and hold something else: said in one line, and nothing is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from bad_inputs import outcome
from stepjepa.batch.stream import STREAM_FILE, Tally
from stepjepa.cli import main
from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.training.failures import naming_damage

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A folder with a model, data, and a run on a stream that was ended after two of its three steps."""
    folder = tmp_path_factory.mktemp("damaged")
    tiny.write_material(folder, trained_tokenizer)
    assert main(given(folder, folder / "whole", "--save_steps", "1")) == 0
    shutil.rmtree(folder / "whole" / "checkpoint-3")
    # As a run that a kill has ended.
    told = json.loads((folder / "whole" / "run.json").read_text())
    write_json(folder / "whole" / "run.json", {**told, "status": "running"})
    return folder


def given(folder: Path, target: Path, *more: str) -> list[str]:
    """A command line."""
    flags = ["--streaming", "--max_steps", "3", "--regular", "--batch_size", "2", "--grad_accum", "1", "--use_cpu"]
    names = ["--train_file", folder / "data.jsonl", "--model_name", folder / "base", "--output_dir", target]
    return list(map(str, ["train", *names, *flags, *more]))


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Other tensors in the place of the weights."""

    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def archive(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Something else in an archive."""

    def apply(folder: Path) -> None:
        found = torch.load(folder / name, weights_only=False)
        changed = change(found)
        torch.save(found if changed is None else changed, folder / name)

    return apply


def stream(**values: Any) -> Callable[[Path], None]:
    """Other values in the count of the stream."""

    def apply(folder: Path) -> None:
        state = json.loads((folder / STREAM_FILE).read_text())
        write_json(folder / STREAM_FILE, {**state, **values})

    return apply


def grown(tensors: dict[str, Any]) -> None:
    """The first matrix or vector gets one row more."""
    name = min(tensors)
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def grow_average(state: dict[str, Any]) -> None:
    """What the optimizer remembers of its first weight is of another one."""
    first = state["state"][min(state["state"])]
    first["exp_avg"] = torch.zeros(3, 5)


def renamed(tensors: dict[str, Any]) -> None:
    """The first tensor gets another name."""
    tensors["other"] = tensors.pop(min(tensors))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "weights with other names": weights(renamed),
    "weights of which one is missing": weights(lambda tensors: tensors.pop(min(tensors))),
    "weights of which one is too many": weights(lambda tensors: tensors.update(other=torch.ones(3))),
    "weights of other shapes": weights(grown),
    "an optimizer of other weights": archive("optimizer.pt", grow_average),
    "an optimizer of fewer groups": archive("optimizer.pt", lambda state: state["param_groups"].pop() and None),
    "an optimizer that is none": archive("optimizer.pt", lambda state: [7]),
    "a schedule that is none": archive("scheduler.pt", lambda state: "x"),
    "random numbers that are none": archive("rng_state.pth", lambda state: {}),
    "a count that is none": stream(totals=7),
    "a count below zero": stream(totals={"records": -1}),
    "an epoch that is none": stream(epoch=None),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_can_not_be_loaded_is_said_in_one_line(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "whole", tmp_path / "run")
    DAMAGES[name](tmp_path / "run" / "checkpoint-2")
    line = given(run, tmp_path / "run", "--save_steps", "1", "--resume_from_checkpoint")
    capsys.readouterr()
    assert main([*line, "last"]) == 2
    said = capsys.readouterr().err.strip()
    assert len([each for each in said.splitlines() if "error: " in each]) == 1, said
    assert "Traceback" not in said
    assert f"{tmp_path}/run/checkpoint-2" in said, said
    if name != "weights of other shapes":
        return
    # What it tells to do: the checkpoint out of the way, and on from the one before it, to the same weights.
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "elsewhere")
    assert outcome(capsys, name, *line, "last") == "sound"
    ours, theirs = (load_file(folder / WEIGHTS) for folder in (tmp_path / "run", run / "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_adapter_that_lacks_a_weight_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT alone would go on from zeros in its place."""
    line = given(run, tmp_path / "run", "--lora", "--lora_rank", "3", "--save_steps", "2")
    assert main(line) == 0
    adapter = tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors"
    tensors = load_file(adapter)
    name = max(tensors)
    save_file({key: tensors[key] for key in tensors if key != name}, adapter, metadata={"format": "pt"})
    shutil.rmtree(tmp_path / "run" / "checkpoint-3", ignore_errors=True)
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    write_json(tmp_path / "run" / "run.json", {**told, "status": "running"})
    capsys.readouterr()
    assert main([*line, "--resume_from_checkpoint", "last"]) == 2
    assert f"its weights are those of another adapter: {name} is missing" in capsys.readouterr().err


COUNTS = {"totals": {"records": 5}, "epoch": 1, "ends_epoch": True, "digest": 11}
WRONG: list[tuple[str, str]] = [
    ("", "not valid JSON"),
    ("[]", "a JSON list instead of an object"),
    ("{}", "'totals' is missing, expected an object"),
    *(
        (json.dumps({**COUNTS, key: value}), words)
        for key, value, words in (
            ("totals", [1], "'totals' is a list, expected an object"),
            ("totals", {"records": 2.5}, "'totals.records' is 2.5, expected a whole number of at least 0"),
            ("totals", {"records": True}, "'totals.records' is True, expected a whole number"),
            ("epoch", -1, "'epoch' is -1, expected a whole number of at least 0"),
            ("epoch", 10**80, "'epoch' is 1000"),
            ("ends_epoch", 1, "'ends_epoch' is 1, expected true or false"),
            ("digest", "11", "'digest' is '11', expected a whole number"),
            ("digest", float("nan"), "'digest' is nan, expected a whole number"),
        )
    ),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_count_of_a_stream_that_is_damaged(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / STREAM_FILE
    path.write_text(json.dumps(COUNTS))
    found = Tally.load(str(tmp_path))
    assert (found.totals["records"], found.epochs, found.share.digest) == (5, 2, 11)
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Tally.load(str(tmp_path))
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)
    assert str(caught.value).endswith("; resume from another checkpoint")


def test_a_full_memory_is_no_damage() -> None:
    with pytest.raises(torch.OutOfMemoryError), naming_damage("checkpoint-2", lambda: True):
        raise torch.OutOfMemoryError("full")
    with pytest.raises(KeyError), naming_damage(None, lambda: True):
        raise KeyError("no checkpoint is loaded")
    words = r"checkpoint-2: can't be resumed \(KeyError: 'x'\); move it elsewhere"
    with pytest.raises(UserError, match=words), naming_damage("checkpoint-2", lambda: True):
        raise KeyError("x")
    with pytest.raises(KeyError), naming_damage("checkpoint-2", lambda: False):
        raise KeyError("of training")
