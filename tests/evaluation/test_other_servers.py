"""vLLM, llama.cpp and other servers give the greedy answers of ``stepjepa evaluate`` from an exported folder.

``STEPJEPA_TEST_SERVER`` is the command of a server with ``{folder}`` and ``{port}``; it names the model ``exported``::

    python -m vllm.entrypoints.openai.api_server --model {folder} --port {port} --served-model-name exported ...
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_other_programs import NEW, Models, Trained, assert_worth_comparing, await_health, content_of, needs_trl

import stepjepa

VARIABLE = "STEPJEPA_TEST_SERVER"
COMMAND = os.environ.get(VARIABLE, "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason=f"{VARIABLE} names no command of a server with {{folder}} and {{port}}"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Models:
    return Models(tmp_path_factory.mktemp("models"), shared_data / "llm_jepa" / "synth_test.jsonl")


@contextmanager
def serving(folder: Path, log: Path, server: str = COMMAND) -> Iterator[str]:
    """Serve a folder on a free loopback port and yield the address; the server and its children are ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [part.format(folder=folder, port=port) for part in shlex.split(server)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)  # the server has libraries of its own
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    try:
        await_health(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(address: str, trained: Trained, name: str, output: Path, *, completions: bool) -> list[dict[str, object]]:
    model = os.fspath(trained.run.folder) if completions else None
    options = {"task": "generic", "max_new_tokens": NEW, "server_model": "exported", "completions": completions}
    return stepjepa.evaluate(model, trained.files[name], output_file=output, server=address, **options).lines


def test_a_server_answers_as_the_built_in_engine(models: Models, tmp_path: Path) -> None:
    """Forty records, and forty with an earlier turn, as messages and as rendered prompts."""
    trained, same = models["chatml"], ("generated", "stopped", "new_tokens", "scores", "truth")
    with serving(trained.folder, tmp_path / "log") as address:
        for name in ("single", "multi"):
            assert_worth_comparing(trained, name)
            expected = [{key: line[key] for key in same} for line in trained.lines[name]]
            for completions in (False, True):
                lines = ask(address, trained, name, tmp_path / f"{name}{completions}.jsonl", completions=completions)
                assert len(lines) == 40
                assert [{key: line[key] for key in same} for line in lines] == expected


@needs_trl
def test_a_server_answers_in_qwen3s_form(models: Models, tmp_path: Path) -> None:
    """With an empty thought, whose tags are special tokens here, in front of every answer."""
    trained = models["qwen3"]
    assert_worth_comparing(trained, "single")
    with serving(trained.folder, tmp_path / "log") as address:
        lines = ask(address, trained, "single", tmp_path / "out.jsonl", completions=False)
    assert len(lines) == 20
    assert [content_of(line["generated"]) for line in lines] == trained.contents("single")
    assert [line["scores"] for line in lines] == [line["scores"] for line in trained.lines["single"]]
