"""Odd ``--config`` files: exit code 2, one line that names the file, no traceback, within seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepjepa.cli.main import main

NUMBER, WHOLE, SWITCH = "expected a number", "expected a whole number", "expected true or false"

# What the file holds, and words of the line that answers it.
FILES: list[tuple[str | bytes, str]] = [
    ("- lbd: 1", "holds a list"),
    ("2026-11-23", "holds a str"),
    ("lbd: 1\n\tgamma: 2", "YAML"),
    ("lbd: *nobody", "YAML"),
    ("lbd: 1\n---\ngamma: 2", "YAML"),
    ("? [lbd]\n: 1", "YAML"),
    # Tags that would make objects.
    ("lbd: !!python/object/apply:os.system ['true']", "YAML"),
    ("lbd: !!binary aGk=", NUMBER),
    (b"\xff\xfe", "UTF-8"),
    ("layot: branched", ":1: unknown argument '--layot=branched'; did you mean --layout?"),
    ("lbd: 1\npooling: meam", ":2: argument --pooling: expected one of last, mean, got 'meam'"),
    # Under a second name, which the message of the flag does not have; of TrainingArguments.
    ("lbd: 1\n\nper_device_train_batch_size: x", ":3: argument --batch_size: expected a whole number, got 'x'"),
    ("lbd: 1\nsave_steps: x", ":2: argument --save_steps: expected a number, got 'x'"),
    ("config: other.yaml", "'config' is no setting of a file"),
    ("jepa: {lbd: 0.1}", "'jepa' is a group of Python alone; write its settings at the top level"),
    ("lbd: 1\nlora: {rank: 3}", ":2: 'lora' is a group of Python alone; write its settings at the top level"),
    ("trainer: {max_steps: 3}", ":1: 'trainer' is a group of Python alone; write its settings at the top level"),
    ("null: 2", "unknown argument '--None=2'"),
    ("'': 1", "unknown argument"),
    ('"\\u001b[2J": 1', "unknown argument"),
    ("help: true", "ignored explicit argument 'true'"),
    ("lr_scheduler_kwargs: &a {b: *a}", "Circular reference"),
    ("lbd: 1\nlbd: 1", "the key 'lbd' occurs twice"),
    ("batch-size: 1\nbatch_size: 2", "occurs twice"),
    ("lr_scheduler_kwargs: {a: 1, a: 2}", "the key 'a' occurs twice"),
    ("lbd: .nan", f"{NUMBER}, got '.nan'"),
    ("lbd: [1, 2]", "unknown argument '2'"),
    ("batch_size: 1e3", WHOLE),
    (f"batch_size: {'9' * 10_000}", WHOLE),
    ("batch_size: 12:30", f"{WHOLE}, got '12:30'"),
    ("columns: [a, null]", ":1: --columns: an item of its list is empty (null)"),
    ("lora: perhaps", SWITCH),
    ("train_file: [[a]]", "no such data file"),
    ('train_file: "a\\0b"', "no such data file"),
    ("lr_scheduler_kwargs: {a: !!timestamp 2026-11-23}", "date is not JSON serializable"),
    ("lbd: " + "[" * 50_000, "YAML"),
    ("&a " * 10_000 + "1", "YAML"),
]


@pytest.mark.sample(11)
@pytest.mark.parametrize(("held", "words"), FILES, ids=range(len(FILES)))
def test_an_odd_file_is_one_line(
    held: str | bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = tmp_path / "odd.yaml", tmp_path / "data.jsonl"
    path.write_bytes(held.encode() if isinstance(held, str) else held)
    data.touch()
    given = ["--model_name", "preset:tiny", "--output_dir", str(tmp_path / "run")]
    given += ["--train_file", str(data)] if "train_file" not in str(held) else []
    start = time.process_time()  # of this process, whatever else the machine does
    code = main(["train", "--config", str(path), *given])
    seconds, (_, output) = time.process_time() - start, capsys.readouterr()
    assert (code, len(output.splitlines())) == (2, 1), output
    assert words in output, output
    assert path.name in output or words == "no such data file"
    assert len(output) < 1000 and "\x1b" not in output
    # The deepest nesting takes PyYAML 1.8 s on a quiet machine, and CPU time grows where cores are shared.
    assert seconds < 6
