"""What a record takes of a process while it trains: two runs in one process, of few and of many records."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base.files import write_jsonl

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
