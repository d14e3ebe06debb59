"""A hundred odd ``--config`` files: exit code 2, one line that names the file, no traceback, within two seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepjepa.cli import main

NUMBER, WHOLE, SWITCH = "expected a number", "expected a whole number", "expected true or false"

# What the file holds, and words of the line that answers it.
FILES: list[tuple[str | bytes, str]] = [
    # No mapping of flags.
    ("- lbd: 1", "holds a list"),
    ("[1, 2]", "holds a list"),
    ("lbd", "holds a str"),
    ("'lbd: 1'", "holds a str"),
    ("3", "holds a int"),
    ("2.5", "holds a float"),
    ("true", "holds a bool"),
    ("2026-11-23", "holds a date"),
    ("|\n  lbd: 1\n", "holds a str"),
    (">\n  lbd: 1\n", "holds a str"),
    ("{1, 2}: 3", "YAML"),
    ("!!set {lbd, gamma}", "holds a set"),
    # No YAML.
    ("lbd: 1\n\tgamma: 2", "YAML"),
    ("\tlbd: 1", "YAML"),
    ("lbd: [1", "YAML"),
    ("lbd: {a: 1", "YAML"),
    ("lbd: 'one", "YAML"),
    ('lbd: "one', "YAML"),
    ('lbd: "\\q"', "YAML"),
    ("lbd: 1: 2", "YAML"),
    ("lbd: @x", "YAML"),
    ("lbd: `x`", "YAML"),
    ("lbd: *nobody", "YAML"),
    ("lbd: &a &b 1", "YAML"),
    ("lbd: 1\n  gamma: 2", "YAML"),
    ("lbd:\n- 1\n gamma: 2", "YAML"),
    ("%YAML 9.9\n---\nlbd: 1\n---\ngamma: 1", "YAML"),
    ("lbd: 1\n---\ngamma: 2", "YAML"),
    ("? [lbd]\n: 1", "YAML"),
    ("? {lbd: 1}\n: 1", "YAML"),
    ("lbd: %", "YAML"),
    ("]", "YAML"),
    ("}", "YAML"),
    ("lbd: ]", "YAML"),
    # Tags that would make objects.
    ("lbd: !!python/object/apply:os.system ['true']", "YAML"),
    ("lbd: !!python/name:os.system", "YAML"),
    ("lbd: !own 1", "YAML"),
    ("!!python/tuple [1]", "YAML"),
    ("lbd: !!binary aGk=", NUMBER),
    ("lbd: !!int one", "YAML"),
    ("lbd: !!float x", "YAML"),
    ("lbd: !!timestamp x", "YAML"),
    # Bytes.
    (b"\xff\xfe", "UTF-8"),
    (b"lbd: \xe9", "UTF-8"),
    (b"lbd: 1\x00", "YAML"),
    (b"lbd: \x07", "YAML"),
    (b"\x80lbd: 1", "UTF-8"),
    ("lbd: 1".encode("utf-16"), "UTF-8"),
    (b"lbd: \xed\xa0\x80", "UTF-8"),
    # Keys.
    ("ldb: 1", "did you mean 'lbd'"),
    ("lerning_rate: 1", "did you mean 'learning_rate'"),
    ("config: other.yaml", "unknown key 'config'"),
    ("--lbd: 1", "unknown key"),
    ("1: 2", "unknown key '1'"),
    ("true: 2", "unknown key 'True'"),
    ("null: 2", "unknown key 'None'"),
    ("2.5: 2", "unknown key '2.5'"),
    ("2026-11-23: 1", "unknown key"),
    ("'': 1", "unknown key ''"),
    ("'l bd': 1", "unknown key 'l bd'"),
    ('"\\u001b[2J": 1', "unknown key"),
    (f"{'x' * 1000}: 1", "unknown key"),
    (f"{'x' * 100_000}: 1", "YAML"),
    ("help: true", "unknown key 'help'"),
    ("train: {lbd: 1}", "unknown key 'train'"),
    # A key twice.
    ("lbd: 1\nlbd: 1", "the key 'lbd' stands twice, first in line 1"),
    ("batch-size: 1\nbatch_size: 2", "stands twice"),
    ("lr_scheduler_kwargs: {a: 1, a: 2}", "the key 'a' stands twice"),
    ("lbd: 1\n? lbd\n: 2", "stands twice"),
    ("<<: {lbd: 1, lbd: 2}", "stands twice"),
    # Values.
    ("lbd: one", f"{NUMBER}, got 'one'"),
    ("lbd: .nan", f"{NUMBER}, got 'nan'"),
    ("lbd: [1, 2]", "lbd: holds a list"),
    ("lbd: {a: 1}", NUMBER),
    ("lbd: true", NUMBER),
    ("lbd: '1 2'", NUMBER),
    ("lbd: 0x", NUMBER),
    ("lbd: -1", "lbd"),
    ("batch_size: 1.5", WHOLE),
    ("batch_size: 1e3", WHOLE),
    ("batch_size: 0", "batch_size"),
    ("batch_size: -2", "batch_size"),
    ("batch_size: 99999999999999999999", WHOLE),
    (f"batch_size: {'9' * 10_000}", "YAML"),
    ("predictors: 1001", "expected 0 to 1000"),
    ("max_length: .inf", WHOLE),
    ("seed: -1", "seed"),
    ("lora: perhaps", SWITCH),
    ("lora: 2", SWITCH),
    ("lora: [true, false]", "lora: holds a list"),
    ("jepa_loss_type: kosine", "invalid choice"),
    ("layout: {a: b}", "layout"),
    ("max_steps: 1.5", WHOLE),
    ("learning_rate: fast", NUMBER),
    ("train_file: [[a]]", "holds a list in a list"),
    ("train_file: [null]", "holds a NoneType in a list"),
    ("train_file: [{a: 1}]", "holds a dict in a list"),
    ("train_file: 2026-11-23", "no such data file"),
    ('train_file: "a\\0b"', "no such data file"),
    ("lr_scheduler_kwargs: {a: 2026-11-23}", "lr_scheduler_kwargs: holds a date"),
    ("lr_scheduler_kwargs: {a: !!set {b}}", "lr_scheduler_kwargs: holds a set"),
    # Bombs: a few lines that stand for billions of values, depth without end, and a value that holds itself.
    (
        "lr_scheduler_kwargs:\n  a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"  {new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "holds more than",
    ),
    ("columns: &a [*a]", "holds a list in a list"),
    ("lr_scheduler_kwargs: &a {b: *a}", "holds more than"),
    ("lbd: " + "[" * 50_000, "YAML"),
    ("lbd: " + "{a: " * 50_000, "YAML"),
    ("- " * 50_000, "YAML"),
    ("&a " * 10_000 + "1", "YAML"),
]


@pytest.mark.parametrize(("held", "words"), FILES, ids=range(len(FILES)))
def test_an_odd_file_is_one_line(
    held: str | bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = tmp_path / "odd.yaml", tmp_path / "data.jsonl"
    path.write_bytes(held.encode() if isinstance(held, str) else held)
    data.touch()
    given = ["--train_file", str(data)] if "train_file" not in str(held) else []
    start = time.monotonic()
    code = main(
        ["train", "--config", str(path), *given, "--model_name", "preset:tiny", "--output_dir", str(tmp_path / "run")]
    )
    seconds, (_, said) = time.monotonic() - start, capsys.readouterr()
    assert (code, len(said.splitlines())) == (2, 1), said
    assert words in said, said
    # What is seen only once all flags are known names the flag.
    assert path.name in said or "--" in said or words == "no such data file"
    assert len(said) < 1000 and "\x1b" not in said
    assert seconds < 2
