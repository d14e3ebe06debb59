"""``--offline``: no connection to another machine, none to a hub, and none within telemetry."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from stepjepa import offline
from stepjepa.errors import UserError
from stepjepa.models.loading import load_tokenizer

HERE = [None, "", "localhost", b"localhost", "127.1.2.3", "::1", "::"]
ELSEWHERE = ["huggingface.co", b"example.com", "93.184.216.34", "2606:4700::1111", "10.0.0.7"]


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE])
def test_connections_to_other_machines_are_refused(host: str | bytes | None) -> None:
    for event, values in (
        ("socket.connect", (None, (host, 443, 0, 0))),
        ("socket.sendto", (None, (host, 53))),
        ("socket.getaddrinfo", (host, 443, 0, 0, 0)),
        ("socket.gethostbyname", (host,)),
    ):
        with nullcontext() if host in HERE else pytest.raises(OSError, match="--offline: no connection to"):
            offline._refuse(event, values)
    for event, values in (
        ("open", (host,)),
        ("socket.connect", (None, "/run/socket")),
        ("socket.bind", (None, (host, 1))),
    ):
        offline._refuse(event, values)


def test_the_flag_the_environment_and_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(offline.STAYS_OFFLINE, raising=False)
    assert offline.wanted(["--a", "--offline"])
    assert not offline.wanted(["--a"])
    monkeypatch.setenv(offline.STAYS_OFFLINE, "1")
    assert offline.wanted([])
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    offline.no_telemetry()
    assert (os.environ["HF_HUB_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("1", "0")


PROBE = """
import socket, sys
tried = []
sys.addaudithook(lambda event, values: event in ("socket.getaddrinfo", "socket.connect") and tried.append(values))
from stepjepa.cli import main
print(main(sys.argv[1:]), len(tried))
try:
    socket.create_connection(("93.184.216.34", 80), timeout=1)
except OSError as error:
    print(error)
"""


def test_a_hub_id_is_an_error_and_no_connection_is_tried(tmp_path: Path) -> None:
    arguments = ["prepare", "gsm8k", "--dataset", "some-org/data", "--output_file", "out.jsonl", "--offline"]
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", offline.STAYS_OFFLINE)
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "2 0", done.stderr
    assert "--offline: no connection to '93.184.216.34'" in done.stdout


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
