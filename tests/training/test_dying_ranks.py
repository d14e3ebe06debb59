"""One of several processes dies, or was given something else: the others end, and the run goes on as if it had not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import kills
import tiny
from ranks import Fault, Ranks
from stepjepa.checkpoints import checkpoints
from stepjepa.files import write_jsonl

STEPS = 6


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    running = Ranks()
    yield running
    running.close()


def train(material: Path, run: Path, steps: int = STEPS) -> list[object]:
    return ["train", *kills.train_flags(material, steps), "--output_dir", run, "--resume_from_checkpoint", "auto"]


# What comes to a launch, with what survives of the run: killed in a step; one that leaves as if all were well; an
# error in the data of one; killed while a checkpoint is written.
FAULTS = [
    (Fault("kill", 1, "loss", 6), ["checkpoint-2"]),
    (Fault("exit", 0, "loss", 3), ["checkpoint-2"]),
    (Fault("error", 1, "data", 6), ["checkpoint-4", "checkpoint-2"]),
    (Fault("kill", 1, "save", 1), ["checkpoint-4", "checkpoint-2"]),
]
ENDED = {"kill": -9, "error": 2, "exit": 0}


@pytest.mark.slow
def test_whatever_one_dies_of_the_others_end_and_the_run_goes_on(ranks: Ranks, material: Path, tmp_path: Path) -> None:
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    ended, said = ranks.together(train(material, whole), log)
    assert ended == [0, 0], said
    for fault, left in FAULTS:
        # Nobody ends the survivor: that it is at an end is its own doing.
        ended, said = ranks.together(train(material, run), log, fault=fault)
        survivor = 1 - fault.rank
        assert ended[fault.rank] == ENDED[fault.kind], said
        assert ended[survivor] == 2, said
        assert f"{left[0]} is complete: resume with --resume_from_checkpoint last" in said[survivor]
        assert "Traceback" not in said[survivor]
        assert [path.name for path in checkpoints(run)] == left
        assert not kills.half_files(run)
    ended, said = ranks.together(train(material, run), log)
    assert ended == [0, 0], said
    assert not kills.left_behind(run)
    for file in ("model.safetensors", f"checkpoint-{STEPS}/model.safetensors"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()


def test_without_their_launcher_they_save_and_end(ranks: Ranks, material: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # More steps than there is time for.
    _, said = ranks.together(train(material, run, 10**6), tmp_path / "log", fault=Fault("launcher", 0, "loss", 5))
    # The one that noticed it first says so; the other may still be asked when it is leaving already.
    assert any("stopped; " in each for each in said), said
    assert not any("Traceback" in each for each in said), said
    assert checkpoints(run)
    assert not kills.half_files(run)
    assert not (run / "model.safetensors").exists()


def test_a_process_that_was_given_another_file_is_refused_by_all(ranks: Ranks, material: Path, tmp_path: Path) -> None:
    run, flags = tmp_path / "run", kills.train_flags(material, STEPS)
    records = [{"messages": list(record.messages)} for record in tiny.records()]
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "train.jsonl", records)
    given = [["--train_file", folder / "train.jsonl"] for folder in (material, tmp_path / "other")]
    position = flags.index("--train_file")
    common = ["train", *flags[:position], *flags[position + 2 :], "--output_dir", run]
    ended, said = ranks.together(common, tmp_path / "log", of_each=given)
    assert ended == [2, 2], said
    for each in said:
        assert "error: processes 0 and 1 were given different data (" in each
    assert not (run / "run.json").exists()


def test_three_processes_of_which_two_have_no_record_at_last(
    ranks: Ranks, trained_tokenizer: Any, tmp_path: Path
) -> None:
    """Nor does it matter what else one of them has drawn: all draw alike what they must."""
    # Without dropout, of which each process draws its own.
    tiny.make_model("llama", seed=3).save_pretrained(tmp_path / "model")
    trained_tokenizer.save_pretrained(tmp_path / "model")
    # The first has pairs, so of three processes two have none.
    records = [{"messages": list(record.messages)} for record in (tiny.records() * 3)[:7]]
    write_jsonl(tmp_path / "train.jsonl", records)
    flags = "--num_epochs 2 --grad_accum 1 --learning_rate 0.01 --optim sgd --jepa_ratio 0.5 --use_cpu --step_jepa"
    flags += " --no_cache --jepa_loss_type infonce --stp 0.3 --save_strategy no --logging_steps 1"
    common = ["train", "--model_name", tmp_path / "model", "--train_file", tmp_path / "train.jsonl", *flags.split()]
    runs = tmp_path / "one", tmp_path / "three"
    for count, run in zip((1, 3), runs, strict=True):
        given = [*common, "--batch_size", 3 // count, "--output_dir", run]
        ended, said = ranks.together(given, tmp_path / "log", ranks=count, fault=Fault("draws", 1, "loss", 2))
        assert ended == [0] * count, said
    one, three = (load_file(run / "model.safetensors") for run in runs)
    assert all((one[name] - three[name]).abs().max() <= 1e-5 for name in one)
    lines = [
        [
            {key: value for key, value in line.items() if key.endswith("loss") and key != "train_loss"}
            for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        ]
        for run in runs
    ]
    assert len(lines[0]) == len(lines[1]) > 5
    for line, same in zip(*lines, strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-5)
