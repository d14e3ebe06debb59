"""Records in a temporary file are the records that were written, in any order, and take no memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base import spool
from stepjepa.base.files import write_jsonl
from stepjepa.base.spool import Spooled
from stepjepa.data.records import Record, parse_record
from stepjepa.data.sources import read_records


def made(count: int) -> list[Record]:
    values = [
        {
            "messages": [
                {"role": "user", "content": f"q{index} ÿ \ud83d\ude00"},
                {"role": "assistant", "content": "a"},
            ],
            "views": [["q", f"a{index}"]],
            "other": {"number": index, "list": [None, 0.5]},
        }
        for index in range(count)
    ]
    return [parse_record(value, "some.jsonl", line) for line, value in enumerate(values, start=1)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 9])
def test_it_is_the_list_that_was_written(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "BLOCK", 3)
    records = made(count)
    spooled = Spooled(iter(records))
    assert len(spooled) == count
    assert list(spooled) == records == list(spooled)
    assert spooled == records
    assert spooled != [*records, *made(1)]
    assert [spooled[index] for index in reversed(range(count))] == records[::-1]
    assert [spooled[-1 - index] for index in range(count)] == records[::-1]
    assert spooled[1:-1] == records[1:-1]
    assert spooled[::-2] == records[::-2]
    with pytest.raises(IndexError):
        spooled[count]


def test_two_may_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "BLOCK", 2)
    records = made(7)
    spooled = Spooled(records)
    assert [*zip(spooled, spooled, strict=True)] == [*zip(records, records, strict=True)]


def test_an_error_of_a_record_is_that_of_reading(tmp_path: Path) -> None:
    def broken() -> object:
        yield from made(2)
        raise ValueError("line 3")

    with pytest.raises(ValueError, match="line 3"):
        Spooled(broken())  # type: ignore[arg-type]


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spooled = Spooled(made(3))
    assert len(spooled) == 3
    assert not [*tmp_path.iterdir()]


def test_a_file_is_read_as_by_read_records(tmp_path: Path) -> None:
    from stepjepa.data.sources import each_record

    write_jsonl(tmp_path / "a.jsonl", [{"question": f"q{index}", "answer": "a"} for index in range(5)])
    assert Spooled(each_record(tmp_path / "a.jsonl")) == read_records(tmp_path / "a.jsonl")


MEASURE = """
import ctypes, gc, re, sys
from pathlib import Path
import pyarrow
import stepjepa
from stepjepa import RunConfig
from transformers import TrainerCallback

class Memory(TrainerCallback):
    \"\"\"Memory of the process that is no file's, at the last step.\"\"\"

    def on_step_end(self, args, state, control, **kwargs):
        gc.collect()
        # What is free already, and waits to be used again, is not taken by records.
        pyarrow.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)
        self.bytes = int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

base, *files = sys.argv[1:]
for number, file in enumerate(files):
    memory = Memory()
    config = RunConfig.from_flat({
        "model_name": base, "train_file": file, "output_dir": f"{file}-{number}", "max_steps": 3, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "batch_size": 4, "cache_dir": f"{file}-{number}-cache",
    })
    stepjepa.run(config, callbacks=[memory])
    print("bytes", memory.bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="memory is read from /proc, and given back by glibc"
)
def test_training_takes_less_than_200_bytes_a_record(tmp_path: Path, trained_tokenizer: Any) -> None:
    """Beside the mapped file of tokens; a list of these records takes some thousand bytes for each."""
    tiny.write_material(tmp_path, trained_tokenizer)
    sizes = {"few": 20_000, "many": 120_000}
    for name, size in sizes.items():
        rows = ({"question": f"What is {index} + {index}?", "answer": f"{2 * index}."} for index in range(size))
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "base")]
    # The first run is there for what a process takes once, such as a full cache of the tokenizer.
    command += [str(tmp_path / f"{name}.jsonl") for name in ("few", "few", "many")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, few, many = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("bytes"))
    assert (many - few) / (sizes["many"] - sizes["few"]) < 200
