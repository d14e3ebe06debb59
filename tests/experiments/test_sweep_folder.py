"""How the processes of a sweep are started."""

import os
import subprocess
from pathlib import Path

import tiny
from stepjepa.experiments.sweep_folder import LAUNCHER
from stepjepa.files import write_jsonl

TASK = """
from helper import last_word
from stepjepa.tasks.base import Scored, Task

class Own(Task):
    name, headline, lenient = "own", "last", "last"
    def truth(self, record): return last_word(record.answer)
    def score(self, record, response): return Scored({"last": last_word(response.text) == self.truth(record)}, {})
"""


def test_no_file_of_the_current_folder_takes_the_place_of_a_module(tmp_path: Path) -> None:
    """But a task that is named is found there, and what PYTHONPATH names as well."""
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    for name in ("pickle", "difflib", "torch", "json"):
        (here / f"{name}.py").write_text(f"import sys\nsys.exit('{name} of the current folder was run')\n")
    (here / "mine.py").write_text(TASK)
    (other / "helper.py").write_text("def last_word(text): return text.split()[-1]\n")
    records = tiny.records()
    write_jsonl(here / "test.jsonl", [{"messages": list(record.messages)} for record in records])
    write_jsonl(here / "said.jsonl", [{"index": i, "generated": each.answer} for i, each in enumerate(records)])
    flags = ["--task", "mine:Own", "--test_file", "test.jsonl", "--predictions", "said.jsonl"]
    command = [*LAUNCHER, "score", *flags, "--output_file", "scored.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(other)}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "scored.jsonl").is_file()
