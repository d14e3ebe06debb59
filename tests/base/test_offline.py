"""``--offline``: no connection to a hub, none within telemetry."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepjepa.base import offline


def test_the_flag_the_environment_and_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*offline.OFFLINE, "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    offline.set_environment(["--a"])
    assert (os.environ["HF_HUB_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("1", "0")
    assert "HF_HUB_OFFLINE" not in os.environ
    offline.set_environment(["--a", "--offline"])
    assert os.environ["HF_HUB_OFFLINE"] == os.environ[offline.STAYS_OFFLINE] == "1"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    offline.set_environment([])
    assert os.environ["HF_HUB_OFFLINE"] == "1"


PROBE = """
import sys
tried = []
sys.addaudithook(lambda event, values: event in ("socket.getaddrinfo", "socket.connect") and tried.append(values))
from stepjepa.cli.main import main
print(main(sys.argv[1:]), len(tried))
"""


@pytest.mark.slow
def test_a_hub_id_is_an_error_and_no_connection_is_tried(tmp_path: Path) -> None:
    arguments = ["prepare", "gsm8k", "--dataset", "some-org/data", "--output_file", "out.jsonl", "--offline"]
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", offline.STAYS_OFFLINE)
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "2 0", done.stderr
