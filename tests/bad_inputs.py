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
from stepjepa.cli import main
from stepjepa.run_folder import write_run

Damage = Callable[[random.Random, list[bytes]], bytes]
"""Makes the bytes of a file from the lines of a sound one."""


def sound_record(chance: random.Random) -> dict[str, Any]:
    """A record that nothing is wrong with."""
    a, b = chance.randrange(97), chance.randrange(97)
    return {
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"What is {a}+{b}?"},
            {"role": "assistant", "content": f"{a} and {b}.\n\nThat is {a + b}.\n\n{a + b}"},
        ],
        "ground_truth": str(a + b),
    }


def sound_lines(chance: random.Random, count: int) -> list[bytes]:
    """A sound file."""
    return [json.dumps(sound_record(chance)).encode() for _ in range(count)]


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join(lines) + b"\n"


def _some_line(change: Callable[[random.Random, bytes], bytes]) -> Damage:
    """Damage to one line."""

    def damage(chance: random.Random, lines: list[bytes]) -> bytes:
        place = chance.randrange(len(lines))
        lines[place] = change(chance, lines[place])
        return _joined(lines)

    return damage


def _some_record(change: Callable[[random.Random, dict[str, Any]], Any]) -> Damage:
    """Damage to one record, which stays JSON."""
    return _some_line(lambda chance, line: json.dumps(change(chance, json.loads(line))).encode())


ODD_VALUES: tuple[Any, ...] = (
    *(None, 7, -0.5, True, "", " \n\t", [], {}, [[]], [None], {"role": "user"}, "\x00", "\x1b[2J\x07", "\u200b"),
    *(
        "\ud800",
        "\u2028",
        "<|predictor_1|>",
        "<|eot_id|><|im_start|>",
        {"a": {"b": [1, {"c": None}]}},
        [1, "x"],
        10**40,
    ),
)


def _set_message(chance: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    message = chance.choice(record["messages"])
    message[chance.choice(["role", "content"])] = chance.choice(ODD_VALUES)
    return record


def _set_field(chance: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    record[chance.choice(["messages", "text", "code", "ground_truth"])] = chance.choice(ODD_VALUES)
    return record


def _drop(chance: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    holder: dict[str, Any] = chance.choice([record, *record["messages"]])
    holder.pop(chance.choice(list(holder)))
    return record


def _roles(chance: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    messages = record["messages"]
    change = chance.randrange(4)
    if change == 0:
        messages.insert(chance.randrange(4), dict(chance.choice(messages)))
    elif change == 1:
        chance.shuffle(messages)
    elif change == 2:
        messages.pop(chance.randrange(3))
    else:
        chance.choice(messages)["role"] = chance.choice(["User", "tool", "function", "x" * 10**5, "\x1b[31muser"])
    return record


def _long_step(chance: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    record["messages"][-1]["content"] = chance.choice(["x", "7 ", "é"]) * 10**6
    return record


def _spelt(chance: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    token = chance.choice(["<|predictor_1|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    chance.choice(record["messages"])["content"] += token * chance.randrange(1, 7)
    return record


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


def _other_json(chance: random.Random, line: bytes) -> bytes:
    return chance.choice(
        [b"null", b"7", b'"x"', b"[]", b"[" + line + b"]", b"{}", b"true", b"NaN", b"[" * 10**5, b'{"a":' * 10**5]
    )


def _number(chance: random.Random, line: bytes) -> bytes:
    value = chance.choice([b"NaN", b"Infinity", b"-Infinity", b"1" * 5000, b"1e999", b"0x10", b"1_0", b"01"])
    return line[:-1] + b', "extra": ' + value + b"}"


def _twice(chance: random.Random, line: bytes) -> bytes:
    return line[:-1] + chance.choice([b', "messages": []}', b', "ground_truth": 1}', b', "a": 1, "a": 2}'])


def _surrogate(chance: random.Random, line: bytes) -> bytes:
    return line.replace(b"What", chance.choice([rb"\ud800", rb"\uDFFF", rb"x\ud83dx"]), 1)


DAMAGES: dict[str, Damage] = {
    "broken UTF-8": _some_line(_insert(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\x80")),
    "a bit flipped": _some_line(_flip),
    "a line cut": _some_line(_cut),
    "control characters": _some_line(_insert(b"\x00", b"\x1b[2J", b"\x07", b"\x0b", b"\x1a", b"\r", b"\x85")),
    "other JSON": _some_line(_other_json),
    "odd numbers": _some_line(_number),
    "a key twice": _some_line(_twice),
    "a lone surrogate": _some_line(_surrogate),
    "an odd value in a message": _some_record(_set_message),
    "an odd value in a record": _some_record(_set_field),
    "a missing key": _some_record(_drop),
    "wrong roles": _some_record(_roles),
    "special tokens spelt": _some_record(_spelt),
    "the last line cut": lambda chance, lines: _joined(lines)[: -chance.randrange(2, len(lines[-1]))],
    "a byte order mark": lambda chance, lines: b"\xef\xbb\xbf" * chance.randrange(1, 3) + _joined(lines),
    "other line ends": lambda chance, lines: chance.choice([b"\r\n", b"\r", b"\n\n\n", b"\n \n"]).join(lines),
    "another encoding": lambda chance, lines: (
        _joined(lines).decode().encode(chance.choice(["utf-16", "utf-32", "cp037"]))
    ),
    "nothing": lambda chance, lines: chance.choice([b"", b"\n", b" \t\n\n", b"\xef\xbb\xbf", b"\x00" * 100]),
    "compressed": lambda chance, lines: chance.choice(
        [gzip.compress(_joined(lines), mtime=0), b"PK\x03\x04" + _joined(lines), b"PAR1" + _joined(lines)]
    ),
    "noise": lambda chance, lines: chance.randbytes(chance.randrange(1, 2000)),
    "shuffled bytes": lambda chance, lines: bytes(chance.sample(_joined(lines), 300)),
}
LARGE: dict[str, Damage] = {
    "a step of a million characters": _some_record(_long_step),
    "a huge line": lambda chance, lines: _joined([lines[0][:-1] + b', "a": "' + b"x" * 10**7 + b'"}', *lines[1:]]),
}


def damaged_file(folder: Path, number: int, seed: int, large: bool = False) -> tuple[str, Path]:
    """One damaged file.

    Args:
        folder: where it is written.
        number: of the file; the kinds of damage take turns.
        seed: of everything.
        large: take one of the large ones.

    Returns:
        The kind of damage, and the file.
    """
    chance = random.Random(f"{seed} {number}")
    kinds = LARGE if large else DAMAGES
    kind = list(kinds)[number % len(kinds)]
    path = folder / f"{number}.jsonl"
    path.write_bytes(kinds[kind](chance, sound_lines(chance, 5)))
    return kind, path


_PIECES = (b"\xff", b"\x00", b"{", b"}", b"[", b'"', b": ", b"\n", b"\t", b"&a ", b"*a", b"!!int ''")
_WHOLES = (b"", b"null", b"[]", b"7", b'"x"', b"{}", b"[" * 10**5, b"{a: " * 10**4, b"\x1f\x8b\x08")
_WORDS = (b"null", b"[1]", b"{}", b"-1", b'"x"', b"1e999", b"true", b"''")


def _shuffled_lines(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    return b"".join(chance.sample(lines, len(lines)))


def _other_word(chance: random.Random, text: bytes) -> bytes:
    words = text.split(b" ")
    words[chance.randrange(len(words))] = chance.choice(_WORDS)
    return b" ".join(words)


TEXT_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_cut, _flip, _insert(*_PIECES), _shuffled_lines, _other_word),
    lambda chance, text: chance.choice(_WHOLES),
    lambda chance, text: text.decode().encode("utf-16"),
)
"""Damage to a small file; now and then it leaves the file sound."""


def damaged_text(chance: random.Random, text: bytes) -> bytes:
    """A small file with something wrong in it."""
    return chance.choice(TEXT_DAMAGES)(chance, text)


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
    given = [str(argument) for argument in arguments]
    capsys.readouterr()
    try:
        code = main(given)
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error} ({' '.join(given)})") from error
    said = capsys.readouterr()
    assert "Traceback" not in said.err, what
    if code == 2:
        lines = [line for line in said.err.strip().splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, f"{what}: {said.err[:2000]}"
        line = lines[0]
        assert line.startswith(f"stepjepa {given[0]}"), f"{what}: {line[:2000]}"
        assert "error: " in line, what
        assert line.isprintable(), what
        assert len(line) < 2500, what
        return Attempt("error", *said)
    assert code == 0, f"{what}: code {code}: {said.err[:2000]}"
    return Attempt("skipped" if "left out (--bad_records skip)" in said.err else "sound", *said)


def try_data(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int, *, large: bool = False) -> str:
    """What a command makes of one damaged file; the commands take turns."""
    kind, path = damaged_file(folder, number, seed, large)
    skip = ["--bad_records", "skip"] if number % 2 else []
    data = ["--train_file", path, "--model_name", "preset:tiny", *skip]
    good = folder / "good.jsonl"
    if not good.exists():
        good.write_bytes(_joined(sound_lines(random.Random(0), 5)))
    commands: list[list[object]] = [
        ["inspect", *data, "--json"],
        ["train", *data, "--dry_run", "--output_dir", folder / "run", "--no_cache"],
        ["score", "--test_file", path, "--predictions", good, "--output_file", folder / "o.jsonl", "--overwrite"],
        ["score", "--test_file", good, "--predictions", path, "--output_file", folder / "o.jsonl", "--overwrite"],
        ["prepare", "gsm8k", "--input_file", path, "--output_file", folder / "p.jsonl", "--overwrite"],
    ]
    found = outcome(capsys, f"seed {seed}, file {number}, {kind}", *commands[number % 5 if not large else number % 3])
    path.unlink()
    return found


CONFIG = b"""train_file: good.jsonl
model_name: preset:tiny
output_dir: run
dry_run: true
batch_size: 2
lbd: 0.5
step_jepa: true
lr_scheduler_kwargs: {a: [1, 2], b: {c: 3}}
report_to: [none]
"""


def try_config(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int) -> str:
    """What ``train`` makes of one damaged configuration file."""
    chance = random.Random(f"config {seed} {number}")
    (folder / "good.jsonl").write_bytes(_joined(sound_lines(random.Random(0), 5)))
    path = folder / f"{number}.yaml"
    path.write_bytes(damaged_text(chance, CONFIG.replace(b"good.jsonl", str(folder / "good.jsonl").encode())))
    arguments = ["--output_dir", folder / "run", "--model_name", "preset:tiny", "--dry_run"]
    return outcome(capsys, f"seed {seed}, configuration {number}", "train", "--config", path, *arguments)


def make_run(folder: Path, tokenizer: Any) -> Path:
    """A run folder with a tiny model in it."""
    tiny.make_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    jepa = {"mode": "regular", "predictors": 0, "plain": False, "step_separator": "blank", "max_length": 512}
    write_run(folder, {"status": "finished", "jepa": jepa, "model": "x", "system_prompts": ["Add."], "training": {}})
    return folder


RUN_FILES = ("run.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def try_run(capsys: pytest.CaptureFixture[str], folder: Path, run: Path, number: int, seed: int) -> str:
    """What ``export`` and ``evaluate`` make of a run folder of which one file is damaged or missing."""
    chance = random.Random(f"run {seed} {number}")
    damaged = run / RUN_FILES[number % len(RUN_FILES)]
    before = damaged.read_bytes()
    (folder / "good.jsonl").write_bytes(_joined(sound_lines(random.Random(0), 2)))
    if chance.random() < 0.1:
        damaged.unlink()
    elif damaged.suffix == ".safetensors":
        # Weights may be any numbers; what says which they are stands in front of them.
        head = chance.choice(
            [b"", before[:7], b"\xff" * 64, _flip(chance, before[:300]), before[: chance.randrange(300)]]
        )
        damaged.write_bytes(head + before[len(head) : chance.choice([len(head), len(before) - 1, len(before)])])
    else:
        damaged.write_bytes(damaged_text(chance, before) if len(before) < 10**6 else before[: chance.randrange(10**4)])
    what = f"seed {seed}, run folder {number}, {damaged.name}"
    target = folder / f"exported{number}"
    evaluate = [
        "--test_file",
        folder / "good.jsonl",
        "--output_file",
        folder / f"e{number}.jsonl",
        "--max_new_tokens",
        1,
    ]
    try:
        if number % 2:
            return outcome(capsys, what, "export", "--model_path", run, "--output_dir", target)
        return outcome(capsys, what, "evaluate", "--model_path", run, *evaluate)
    finally:
        damaged.write_bytes(before)
