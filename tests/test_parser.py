"""Errors of the command line: one line, the nearest name that there is, and what to do."""

import pytest

from stepjepa.cli import main

TRAIN = ["train", "--train_file", "t", "--model_name", "preset:tiny", "--output_dir", "run"]

ERRORS = [
    (["trian"], "unknown command 'trian'; did you mean train?"),
    (["xyz"], "unknown command 'xyz'; choose one of prepare, "),
    (["train"], "are required: --model_name, --output_dir; stepjepa train --help says more"),
    (["train", "--modle_name", "x"], "unknown argument '--modle_name'; did you mean --model_name?"),
    ([*TRAIN, "--xyzzy"], "unknown argument '--xyzzy'; stepjepa train --help_all names all"),
    ([*TRAIN, "stray"], "unknown argument 'stray'; it belongs to no flag"),
    ([*TRAIN, "--pooling", "meam"], "argument --pooling: expected one of last, mean, got 'meam'"),
    ([*TRAIN, "--per_device_train_batch_size", "1.5"], "argument --batch_size: expected a whole number, got '1.5'"),
    ([*TRAIN, "--save_steps", "x"], "argument --save_steps: expected a number, got 'x'"),
    ([*TRAIN, "--lora", "maybe"], "argument --lora: expected true or false, got 'maybe'"),
    ([*TRAIN, "--term_args", "[]"], "argument --term_args: expected a JSON object in braces, got '[]'"),
    (["prepare"], "are required: KIND; stepjepa prepare --help says more"),
    (["prepare", "nl-rx", "--sized", "4", "--output_file", "x"], "unknown argument '--sized'; did you mean --size?"),
    (["evaluate"], "are required: --test_file, --output_file, --model_path; stepjepa evaluate --help says more"),
]


@pytest.mark.parametrize(("given", "words"), ERRORS, ids=[" ".join(given) for given, _ in ERRORS])
def test_errors_tell_the_remedy(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("stepjepa")
    assert words in line
