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
from stepjepa.files import write_jsonl

SECRETS = {
    "HF_TOKEN": "hf_sEcReT1sEcReT1sEcReT1",
    "HUGGING_FACE_HUB_TOKEN": "hf_sEcReT2sEcReT2sEcReT2",
    "WANDB_API_KEY": "sEcReT3" * 6,
    "AWS_SECRET_ACCESS_KEY": "sEcReT4sEcReT4",
    "SOME_PASSWORD": "sEcReT5sEcReT5",
}

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
from stepjepa.cli import main
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
    kept = {name: value for name, value in os.environ.items() if name not in gone}
    home = {"HOME": str(folder / "home"), "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    code = [sys.executable, "-c", CLOSED, "lines.json", "found.json"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', *code],
        cwd=folder,
        env={**kept, **home, **SECRETS},
        capture_output=True,
        timeout=240,
        check=False,
        start_new_session=True,  # without a terminal to ask
    )
    (folder / "out").write_bytes(done.stdout)
    (folder / "err").write_bytes(done.stderr)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return folder


pytestmark = pytest.mark.skipif(os.name != "posix", reason="closes standard input by a shell")


def test_everything_works_and_no_connection_is_tried(place: Path) -> None:
    found = json.loads((place / "found.json").read_text(encoding="utf-8"))
    assert found == {"codes": [0] * 6, "tried": []}, (place / "err").read_text()
    assert (place / "bild ü.png").stat().st_size > 1000
    run = place / "läufe" / "a b"
    assert (run / "test ü.summary.json").is_file()
    assert (place / "läufe" / "export" / "model.safetensors").is_file()
    out = (place / "out").read_text(encoding="ascii")
    assert "bit for bit" in out
    assert "Traceback" not in (place / "err").read_text(encoding="ascii")


def test_no_colours_without_a_terminal(place: Path) -> None:
    assert b"\x1b" not in (place / "out").read_bytes() + (place / "err").read_bytes()


def test_no_secret_of_the_environment_is_in_any_file(place: Path) -> None:
    files = [file for file in place.rglob("*") if file.is_file()]
    assert any(file.name == "run.json" for file in files)
    assert any(file.name == "training_args.bin" for file in files)
    for file in files:
        assert b"sEcReT" not in file.read_bytes(), file


def test_weights_are_saved_as_safetensors_alone(place: Path) -> None:
    names = {file.name for file in (place / "läufe").rglob("*") if file.suffix in (".bin", ".pt", ".pth", ".pkl")}
    # The state of the optimizer, which is read as weights only, and what the Trainer writes and nobody reads.
    assert names <= {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
