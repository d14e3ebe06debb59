"""The program where nobody watches: no terminal, no standard input, no home to write to, odd names, no network.

One process does all of it, since starting one takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from stepjepa.base.files import write_jsonl

SECRETS = dict.fromkeys(
    ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SOME_PASSWORD"), "hf_sEcReTsEcReTsEcReT"
)

# Closed sockets: each try is noted and fails.
CLOSED = """
import json, sys
tried = []
def closed(event, values):
    if event.startswith("socket.") and event.partition(".")[2] in (
        "connect", "getaddrinfo", "gethostbyname", "gethostbyaddr", "sendto", "sendmsg", "bind"
    ):
        tried.append(event)
        raise OSError("the sockets are closed")
sys.addaudithook(closed)
from stepjepa.cli.main import main
codes = [main(line) for line in json.load(open(sys.argv[1]))]
json.dump({"codes": codes, "tried": tried}, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a model was trained, looked at, evaluated and exported by the process described above."""
    folder = tmp_path_factory.mktemp("a b") / 'mit Leerzeichen – ünïcødé 中文 \'n "q"'
    folder.mkdir()
    write_jsonl(folder / "übung 1.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 2])
    # What lies in it can't be made, by root neither.
    (folder / "home").write_text("a file", encoding="utf-8")
    data, run = "übung 1.jsonl", "läufe/a b"
    objective = ["--step_jepa", "--model_name", "preset:tiny"]
    training = ["--max_steps", "2", "--batch_size", "2", "--grad_accum", "1", "--use_cpu", "--save_steps", "1"]
    training += ["--eval_file", data, "--run_name", "n"]
    evaluation = ["--max_new_tokens", "3", "--max_examples", "2"]
    lines = [
        ["train", "--train_file", data, *objective, *training, "--output_dir", run],
        ["inspect", "--train_file", data, *objective, "--png", "bild ü.png"],
        ["evaluate", "--model_path", run, "--test_file", data, "--output_file", f"{run}/test ü.jsonl", *evaluation],
        ["export", "--model_path", run, "--output_dir", "läufe/export"],
        ["rerun", run],
        ["report", run],
    ]
    (folder / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
    gone = ("HF_HUB_OFFLINE", "XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR", "TERM", "COLUMNS", "FORCE_COLOR")
    variables = {name: value for name, value in os.environ.items() if name not in gone}
    home = {"HOME": str(folder / "home"), "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    code = [sys.executable, "-c", CLOSED, "lines.json", "found.json"]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        closed = ["sh", "-c", 'exec "$0" "$@" <&-', *code]
        # A new session, without a terminal to ask.
        environment = {**variables, **home, **SECRETS}
        subprocess.run(
            closed, cwd=folder, env=environment, stdout=out, stderr=err, timeout=240, check=True, start_new_session=True
        )
    return folder


pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="closes standard input by a shell"),
    pytest.mark.slow,  # six commands without any cache, half a minute
]


def test_everything_works_and_no_connection_is_tried(place: Path) -> None:
    outcome = json.loads((place / "found.json").read_text(encoding="utf-8"))
    assert outcome == {"codes": [0] * 6, "tried": []}, (place / "err").read_text()
    run = place / "läufe" / "a b"
    for file in (place / "bild ü.png", run / "test ü.summary.json", place / "läufe" / "export" / "model.safetensors"):
        assert file.stat().st_size > 0
    assert "bit for bit" in (place / "out").read_text(encoding="ascii")
    assert "Traceback" not in (place / "err").read_text(encoding="ascii")
    # No colours without a terminal.
    assert b"\x1b" not in (place / "out").read_bytes() + (place / "err").read_bytes()


def test_no_secret_of_the_environment_and_no_pickled_weights_are_in_any_file(place: Path) -> None:
    files = [file for file in place.rglob("*") if file.is_file()]
    for file in files:
        assert b"sEcReT" not in file.read_bytes(), file
    names = {file.name for file in files if file.suffix in (".bin", ".pt", ".pth", ".pkl")}
    # The states of the optimizer and of the open log line, which are read as weights only, and what the Trainer writes
    # and nobody reads.
    assert names == {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "log_line_0.pt"}
