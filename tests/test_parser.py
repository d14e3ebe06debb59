"""Errors of the command line: one line, the nearest name that there is, and what to do."""

from pathlib import Path

import pytest

from stepjepa.cli import main

TRAIN = ["train", "--train_file", "t", "--model_name", "preset:tiny", "--output_dir", "run"]

ERRORS = [
    (["trian"], "unknown command 'trian'; did you mean train?"),
    (["--hlep"], "unknown command '--hlep'; did you mean --help?"),
    (["xyz"], "unknown command 'xyz'; choose one of prepare, "),
    (["train"], "--model_name and --output_dir are missing; stepjepa train --help says more"),
    (["train", "--modle_name", "x"], "unknown argument '--modle_name'; did you mean --model_name?"),
    ([*TRAIN, "--logging_stesp", "3"], "did you mean --logging_steps?"),
    ([*TRAIN, "--xyzzy"], "unknown argument '--xyzzy'; stepjepa train --help_all names all"),
    (
        [*TRAIN, "stray"],
        "unknown argument 'stray', which belongs to no flag; leave it out, put several files together into one, or",
    ),
    ([*TRAIN, "--pooling", "meam"], "argument --pooling: invalid choice 'meam'; did you mean 'mean'?"),
    ([*TRAIN, "--pooling", "xyz"], "argument --pooling: invalid choice: 'xyz' (choose from "),
    ([*TRAIN, "--pooling"], "--pooling needs a value: one of last, mean; give it one, or leave"),
    ([*TRAIN, "--cache_dir"], "--cache_dir needs a value; give it one, or leave the flag out"),
    ([*TRAIN, "--predictors", "two"], "argument --predictors: expected a whole number, got 'two'"),
    ([*TRAIN, "--lbd", "high"], "argument --lbd: expected a number, got 'high'"),
    ([*TRAIN, "--batch_size", "1.5"], "argument --batch_size: expected a whole number, got '1.5'"),
    ([*TRAIN, "--lr_scheduler_type", "cosin"], "argument --lr_scheduler_type: invalid choice 'cosin'; did you mean"),
    ([*TRAIN, "--save_steps", "x"], "argument --save_steps: expected a number, got 'x'"),
    (["estimate", "--gpu", "4"], "unknown argument '--gpu'; did you mean --gpus?"),
    (["inspect", "--train_file", "x", "--model_name", "x", "--idnex", "4"], "did you mean --index?"),
    (["verify", "--step_jeap"], "did you mean --step_jepa?"),
    (["prepare"], "the following arguments are required: KIND; choose one of chat, steps, gsm8k, "),
    (["prepare", "gsmk8"], "argument KIND: invalid choice 'gsmk8'; did you mean 'gsm8k'?"),
    (["prepare", "nl-rx", "--sized", "4", "--output_file", "x"], "unknown argument '--sized'; did you mean --size?"),
    (["evaluate", "--model_pth", "x"], "unknown argument '--model_pth'; did you mean --model_path?"),
    (
        ["evaluate"],
        "are required: --model_path/--model_name, --test_file/--input_file, --output_file; stepjepa evaluate",
    ),
    (["score", "--x", "y"], "are required: --test_file, --predictions, --output_file; stepjepa score --help says more"),
    (["analyze", "--projections", "tsn"], "did you mean 'tsne'?"),
    (["export", "--modelpath", "x"], "did you mean --model_path?"),
    (["report", "--jsn", "a"], "did you mean --json?"),
    (["compare", "a", "--format", "latx"], "argument --format: invalid choice 'latx'; did you mean 'latex'?"),
    (["sweep", "--output_dr", "x"], "did you mean --output_dir?"),
    (["rerun", "--alow_changes", "f"], "did you mean --allow_changes?"),
    (["rerun"], "the following arguments are required: FOLDER; stepjepa rerun --help says more"),
    (["completion", "bsh"], "argument shell: invalid choice 'bsh'; did you mean 'bash'?"),
    (["completion"], "are required: shell; choose one of bash, zsh, fish"),
]


@pytest.mark.parametrize(("given", "words"), ERRORS, ids=[" ".join(given) for given, _ in ERRORS])
def test_errors_tell_the_remedy(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("stepjepa")
    assert words in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("layot: branched\n", ":1: unknown key 'layot'; did you mean 'layout'?"),
        ("lbd: 1\npooling: meam\n", ":2: argument --pooling: invalid choice 'meam'; did you mean 'mean'?"),
        ("lbd: 1\nbatch_size: 0\n", ":2: argument --batch_size: expected 1 or more, got 0"),
        # Under a second name, which the message of the flag does not have.
        ("lbd: 1\n\nper_device_train_batch_size: x\n", ":3: argument --batch_size: expected a whole number, got 'x'"),
    ],
)
def test_errors_of_a_file_name_its_line(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content, encoding="utf-8")
    assert main([*TRAIN, "--config", str(file)]) == 2
    assert f"{file}{words}" in capsys.readouterr().err
