"""``--offline``: no connection to another machine, none to a hub, and none within telemetry."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import tiny
from stepjepa import offline
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl
from stepjepa.models.loading import load_tokenizer


@pytest.mark.parametrize("host", [None, "", "localhost", b"localhost", "127.0.0.1", "127.1.2.3", "::1", "::"])
def test_this_machine_is_here(host: str | bytes | None) -> None:
    assert offline._is_here(host)
    offline._refuse("socket.connect", (None, (host, 80)))
    offline._refuse("socket.getaddrinfo", (host, 80, 0, 0, 0))


@pytest.mark.parametrize(
    "host", ["huggingface.co", b"example.com", "93.184.216.34", "8.8.8.8", "2606:4700::1111", "10.0.0.7"]
)
def test_others_are_not(host: str | bytes) -> None:
    assert not offline._is_here(host)
    for event, values in (
        ("socket.connect", (None, (host, 443))),
        ("socket.connect", (None, (host, 443, 0, 0))),
        ("socket.sendto", (None, (host, 53))),
        ("socket.getaddrinfo", (host, 443, 0, 0, 0)),
        ("socket.gethostbyname", (host,)),
    ):
        with pytest.raises(OSError, match="--offline: no connection to"):
            offline._refuse(event, values)


def test_other_events_and_sockets_of_files_pass() -> None:
    for event, values in (
        ("open", ("8.8.8.8",)),
        ("socket.connect", (None, "/run/socket")),
        ("socket.bind", (None, ("8.8.8.8", 1))),
    ):
        offline._refuse(event, values)


def test_asked_for_by_a_flag_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(offline.STAYS_OFFLINE, raising=False)
    assert offline.wanted(["--a", "--offline"])
    assert not offline.wanted(["--a"])
    monkeypatch.setenv(offline.STAYS_OFFLINE, "1")
    assert offline.wanted([])


def test_telemetry_is_off_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    offline.no_telemetry()
    assert (os.environ["HF_HUB_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("1", "0")


PROBE = """
import json, socket, sys
tried = []
def watch(event, values):
    if event in ("socket.getaddrinfo", "socket.gethostbyname") or event == "socket.connect":
        tried.append(f"{event} {values[-1] if event == 'socket.connect' else values[0]}")
sys.addaudithook(watch)
from stepjepa.cli import main
codes = [main(line) for line in json.loads(sys.argv[1])]
before = list(tried)
listening = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listening.getsockname()).close()
try:
    socket.create_connection(("93.184.216.34", 80), timeout=1)
except OSError as error:
    codes.append(str(error))
import os
print(json.dumps([codes, before, os.environ["HF_HUB_OFFLINE"], os.environ["STEPJEPA_OFFLINE"]]))
"""


def test_a_hub_id_is_an_error_of_one_line_and_no_connection_is_tried(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    lines = [
        ["inspect", "--offline", "--train_file", "train.jsonl", "--model_name", "some-org/some-model"],
        ["prepare", "gsm8k", "--dataset", "some-org/data", "--output_file", "out.jsonl", "--offline"],
    ]
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", offline.STAYS_OFFLINE)
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(lines)],
        cwd=tmp_path,
        env={**clean, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes, tried, hub, ours = json.loads(done.stdout.splitlines()[-1])
    assert codes[:2] == [2, 2], done.stderr
    assert "--offline: no connection to '93.184.216.34'" in codes[2]
    assert (tried, hub, ours) == ([], "1", "1")
    errors = done.stderr.strip().splitlines()
    assert [line.split(":")[0] for line in errors] == ["stepjepa inspect", "stepjepa prepare"]
    assert not (tmp_path / "out.jsonl").exists()


def test_the_hook_is_that_of_python() -> None:
    """The names of the events are those that sockets raise."""
    code = (
        "import sys; met = set(); sys.addaudithook(lambda event, values: met.add(event)); import socket\n"
        "for what in (lambda: socket.getaddrinfo('127.0.0.1', 1), lambda: socket.gethostbyname('127.0.0.1'),\n"
        "             lambda: socket.socket().connect(('127.0.0.1', 1)),\n"
        "             lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))):\n"
        "    try: what()\n"
        "    except OSError: pass\n"
        "print(*sorted(met & {'socket.getaddrinfo', 'socket.gethostbyname', 'socket.connect', 'socket.sendto'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"]
    assert {*offline._LOOKUPS, *offline._CONNECTIONS} >= set(done.stdout.split())
    assert socket.gethostname()


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens at the discard port
    monkeypatch.setenv("no_proxy", "*")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="neither a folder here nor in the hub's cache, and the hub was not reached"):
        load_tokenizer("nobody/nothing")
    assert constants.HF_HUB_OFFLINE
    assert "note: http://127.0.0.1:9 can't be reached" in capsys.readouterr().err
