"""Damaged files, made from a seed: what exports, editors, scripts and disks do to data; and commands on them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tiny
from stepjepa.base.files import write_json
from stepjepa.cli.main import main
from stepjepa.store.folder import RUN_FILE

ODD_VALUES: tuple[Any, ...] = (
    *(None, 7, -0.5, True, "", " \n\t", [], {}, [[]], [None], {"role": "user"}, "\x00", "\x1b[2J\x07", "\u200b"),
    *("\ud800", "\u2028", "<|predictor_1|>", "<|im_start|>", {"a": {"b": [1, {"c": None}]}}, [1, "x"], 10**40),
)


def sound_lines(chance: random.Random, count: int) -> list[bytes]:
    """A file of records that nothing is wrong with."""
    lines = []
    for _ in range(count):
        a, b = chance.randrange(97), chance.randrange(97)
        texts = {"system": "Add.", "user": f"What is {a}+{b}?", "assistant": f"{a} and {b}.\n\nSum {a + b}.\n\n{a + b}"}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        lines.append(json.dumps({"messages": messages, "ground_truth": str(a + b)}).encode())
    return lines


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join(lines) + b"\n"


def _changed(change: Callable[[random.Random, dict[str, Any]], Any]) -> Callable[[random.Random, bytes], bytes]:
    """Damage to one record in place, which stays JSON."""

    def changed(chance: random.Random, line: bytes) -> bytes:
        record = json.loads(line)
        change(chance, record)
        return json.dumps(record).encode()

    return changed


def _set_value(chance: random.Random, record: dict[str, Any]) -> None:
    fields = [(record, "messages"), (record, "text"), *((record["messages"][1], name) for name in ("role", "content"))]
    holder, name = chance.choice(fields)
    holder[name] = chance.choice(ODD_VALUES)


def _drop(chance: random.Random, record: dict[str, Any]) -> None:
    holder: dict[str, Any] = chance.choice([record, *record["messages"]])
    holder.pop(chance.choice(list(holder)))


def _flip(chance: random.Random, line: bytes) -> bytes:
    place = chance.randrange(len(line))
    return line[:place] + bytes([line[place] ^ (1 << chance.randrange(8))]) + line[place + 1 :]


def _cut(chance: random.Random, line: bytes) -> bytes:
    return line[: chance.randrange(1, len(line))]


def _insert(*pieces: bytes) -> Callable[[random.Random, bytes], bytes]:
    def insert(chance: random.Random, line: bytes) -> bytes:
        place = chance.randrange(len(line) + 1)
        return line[:place] + chance.choice(pieces) + line[place:]

    return insert


_OTHER = (b"null", b"7", b'"x"', b"[]", b"{}", b"NaN", b"[" * 10**5, b'{"a":' * 10**5)
_ENDS = (b'"a": NaN', b'"a": -Infinity', b'"a": ' + b"1" * 5000, b'"a": 1e999', b'"messages": []', b'"a": 1, "a": 2')

OF_A_LINE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "broken UTF-8": _insert(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"),
    "a bit flipped": _flip,
    "a line cut": _cut,
    "control characters": _insert(b"\x00", b"\x1b[2J", b"\x07", b"\x0b", b"\r", b"\x85"),
    "other JSON": lambda chance, line: chance.choice([*_OTHER, b"[" + line + b"]"]),
    "odd numbers, a key twice": lambda chance, line: line[:-1] + b", " + chance.choice(_ENDS) + b"}",
    "a lone surrogate": lambda chance, line: line.replace(b"What", rb"x\ud83dx"),
    "an odd value": _changed(_set_value),
    "a missing key": _changed(_drop),
    "a message missing": _changed(lambda chance, record: record["messages"].pop(chance.randrange(3))),
    "messages in another order": _changed(lambda chance, record: chance.shuffle(record["messages"])),
}
OF_A_FILE: dict[str, Callable[[random.Random, list[bytes]], bytes]] = {
    "the last line cut": lambda chance, lines: _joined(lines)[: -chance.randrange(2, len(lines[-1]))],
    "a byte order mark": lambda chance, lines: b"\xef\xbb\xbf" * chance.randrange(1, 3) + _joined(lines),
    "other line ends": lambda chance, lines: chance.choice([b"\r\n", b"\r", b"\n\n\n", b"\n \n"]).join(lines),
    "another encoding": lambda chance, lines: _joined(lines).decode().encode(chance.choice(["utf-16", "cp037"])),
    "nothing": lambda chance, lines: chance.choice([b"", b" \t\n\n", b"\xef\xbb\xbf", b"\x00" * 100]),
    "compressed": lambda chance, lines: gzip.compress(_joined(lines), mtime=0),
    "noise": lambda chance, lines: chance.randbytes(chance.randrange(1, 2000)),
}


def damaged_text(chance: random.Random, text: bytes) -> bytes:
    """A small file with something wrong in it; now and then it is sound."""
    lines, words = text.splitlines(keepends=True), text.split(b" ")
    words[chance.randrange(len(words))] = chance.choice([b"null", b"[1]", b"{}", b"-1", b'"x"', b"1e999", b"''"])
    insert = _insert(b"\xff", b"\x00", b"{", b"}", b"[", b'"', b": ", b"\n", b"\t", b"&a ", b"*a", b"!!int ''")
    ending = (
        *(_cut(chance, text), _flip(chance, text), insert(chance, text), b"".join(chance.sample(lines, len(lines)))),
        *(b" ".join(words), chance.choice([*_OTHER, b"", b"{a: " * 10**4, b"\x1f\x8b\x08"])),
        text.decode().encode("utf-16"),
    )
    return chance.choice(ending)


class Attempt(NamedTuple):
    """What became of a command: ``error``, ``skipped`` or ``sound``; and what it said."""

    outcome: str
    out: str
    err: str


def outcome(capsys: pytest.CaptureFixture[str], what: str, *arguments: object) -> str:
    """The outcome of :func:`attempt`."""
    return attempt(capsys, what, *arguments).outcome


def attempt(capsys: pytest.CaptureFixture[str], what: str, *arguments: object) -> Attempt:
    """Run a command on something damaged; it may find it sound, leave it out, or say in one line what is wrong.

    Args:
        capsys: of the test.
        what: tells what was damaged, for the message of a test that fails.
        arguments: of the command line.
    """
    words = [str(argument) for argument in arguments]
    capsys.readouterr()
    try:
        code = main(words)
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error} ({' '.join(words)})") from error
    output = capsys.readouterr()
    assert "Traceback" not in output.err, what
    if code == 2:
        lines = [line for line in output.err.strip().splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, f"{what}: {output.err[:2000]}"
        assert lines[0].startswith(f"stepjepa {words[0]}: error: "), f"{what}: {lines[0][:2000]}"
        assert lines[0].isprintable(), what
        return Attempt("error", *output)
    assert code == 0, f"{what}: code {code}: {output.err[:2000]}"
    return Attempt("skipped" if "skipped (--bad_records skip)" in output.err else "sound", *output)


def try_data(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int) -> str:
    """What a command makes of one damaged file; the commands and the kinds of damage take turns."""
    chance, kinds = random.Random(f"{seed} {number}"), [*OF_A_LINE, *OF_A_FILE]
    kind, lines = kinds[number % len(kinds)], sound_lines(chance, 5)
    path, good, scored = folder / f"{number}.jsonl", folder / "good.jsonl", folder / "o.jsonl"
    good.write_bytes(_joined(sound_lines(random.Random(0), 5)))
    if kind in OF_A_LINE:
        place = chance.randrange(len(lines))
        lines[place] = OF_A_LINE[kind](chance, lines[place])
    path.write_bytes(_joined(lines) if kind in OF_A_LINE else OF_A_FILE[kind](chance, lines))
    data = ["--train_file", path, "--model_name", "preset:tiny", *(["--bad_records", "skip"] if number % 2 else [])]
    commands: list[list[object]] = [
        ["inspect", *data, "--json"],
        ["train", *data, "--dry_run", "--output_dir", folder / "run", "--no_cache"],
        ["score", "--test_file", path, "--predictions", good, "--output_file", scored, "--overwrite"],
        ["score", "--test_file", good, "--predictions", path, "--output_file", scored, "--overwrite"],
        ["prepare", "gsm8k", "--input_file", path, "--output_file", folder / "p.jsonl", "--overwrite"],
    ]
    ending = outcome(capsys, f"seed {seed}, file {number}, {kind}", *commands[number % 5])
    path.unlink()
    return ending


CONFIG = """model_name: preset:tiny
train_file: {good}
output_dir: run
dry_run: true
batch_size: 2
lbd: 0.5
step_jepa: true
lr_scheduler_kwargs: {{a: [1, 2], b: {{c: 3}}}}
report_to: [none]
"""


def try_config(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int) -> str:
    """What ``train`` makes of one damaged configuration file."""
    chance, good, path = random.Random(f"config {seed} {number}"), folder / "good.jsonl", folder / f"{number}.yaml"
    good.write_bytes(_joined(sound_lines(random.Random(0), 5)))
    path.write_bytes(damaged_text(chance, CONFIG.format(good=good).encode()))
    arguments = ["--output_dir", folder / "run", "--model_name", "preset:tiny", "--dry_run"]
    return outcome(capsys, f"seed {seed}, configuration {number}", "train", "--config", path, *arguments)


def make_run(folder: Path, tokenizer: Any) -> Path:
    """A run folder with a tiny model in it."""
    tiny.make_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    jepa = {"mode": "regular", "predictors": 0, "plain": False, "step_separator": "blank", "max_length": 512}
    write_json(
        folder / RUN_FILE,
        {"status": "finished", "jepa": jepa, "model": "x", "system_prompts": ["Add."], "training": {}},
    )
    return folder


RUN_FILES = ("run.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def try_run(capsys: pytest.CaptureFixture[str], folder: Path, run: Path, number: int, seed: int) -> str:
    """What ``export`` and ``evaluate`` make of a run folder of which one file is damaged or missing."""
    chance, good, damaged = random.Random(f"run {seed} {number}"), folder / "good.jsonl", run / RUN_FILES[number % 5]
    before = damaged.read_bytes()
    good.write_bytes(_joined(sound_lines(random.Random(0), 2)))
    if chance.random() < 0.1:
        damaged.unlink()
    elif damaged.suffix == ".safetensors":
        # Weights may be any numbers; what says which they are stands in front of them.
        heads = [b"", before[:7], b"\xff" * 64, _flip(chance, before[:300]), before[: chance.randrange(300)]]
        head = chance.choice(heads)
        damaged.write_bytes(head + before[len(head) : chance.choice([len(head), len(before) - 1, len(before)])])
    else:
        damaged.write_bytes(damaged_text(chance, before) if len(before) < 10**6 else before[: chance.randrange(10**4)])
    what = f"seed {seed}, run folder {number}, {damaged.name}"
    evaluate = ["--test_file", good, "--output_file", folder / f"e{number}.jsonl", "--max_new_tokens", 1]
    try:
        if number % 2:
            return outcome(capsys, what, "export", "--model_path", run, "--output_dir", folder / f"exported{number}")
        return outcome(capsys, what, "evaluate", "--model_path", run, *evaluate)
    finally:
        damaged.write_bytes(before)
