"""Other programs give the greedy answers of ``stepjepa evaluate`` from an exported folder, in several chat formats."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import stepjepa
from chat_templates import FORMS, Form, in_form
from forked import start, status
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.chat.content import content_part
from stepjepa.cli.main import main
from stepjepa.models.presets import preset_config, train_tokenizer

pytestmark = pytest.mark.slow

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the templates are TRL's: pip install trl"
)
SERVING = ("httpx", "fastapi", "uvicorn", "openai")
needs_serving = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in SERVING),
    reason="needs a server and httpx: pip install 'transformers[serving]' 'stepjepa[server]'",
)
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'stepjepa[harness]'"
)

NEW = 64
SYSTEM = "Convert natural language to regular expression."


def template_of(name: str) -> str:
    """One of the chat templates that TRL comes with."""
    folder = Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
    return (folder / name).read_text(encoding="utf-8")


def form_of(name: str) -> Form | None:
    """Template and special tokens of a chat format; None for ChatML, which a preset's tokenizer has."""
    match name:
        case "llama3":
            return replace(FORMS["Llama-3.2"], template=template_of("llama3_2.jinja"))
        case "qwen3":
            tokens = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
            return Form(template_of("qwen3.jinja"), tokens, "<|im_end|>")
        case _:
            return None


FORMATS = ["chatml", pytest.param("llama3", marks=needs_trl), pytest.param("qwen3", marks=needs_trl)]


def content_of(generated: object) -> str:
    """An answer without its thought and the blanks around it: other programs drop the marks of a thought, not these."""
    return content_part(str(generated)).strip()


@dataclass(frozen=True)
class Trained:
    """A run, its exported folder, files of records, and the lines that ``stepjepa evaluate`` wrote for each."""

    run: stepjepa.Run
    folder: Path
    files: dict[str, Path]
    lines: dict[str, list[dict[str, object]]]

    def contents(self, name: str) -> list[str]:
        """The answers without thoughts."""
        return [content_of(line["generated"]) for line in self.lines[name]]


class Models:
    """A model for each chat format, trained on a few records until it answers and stops."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder, self._made = folder, dict[str, Trained]()
        lines = data.read_text(encoding="utf-8").splitlines()[:120]
        self._chats = [json.loads(line)["messages"] for line in lines]

    def __getitem__(self, name: str) -> Trained:
        if name not in self._made:
            self._made[name] = self._make(name, 40 if name == "chatml" else 20)
        return self._made[name]

    def _make(self, name: str, count: int) -> Trained:
        folder, chats = self._folder / name, self._chats
        folder.mkdir()
        groups = {"single": chats[:count]}
        if name == "chatml":
            pairs = zip(chats[40:80], chats[80:], strict=True)
            groups["multi"] = [[*first, *second[1:]] for first, second in pairs]
        files = {group: folder / f"{group}.jsonl" for group in groups}
        for group, file in files.items():
            write_jsonl(file, [{"messages": messages} for messages in groups[group]])
        training = folder / "train.jsonl"
        write_jsonl(training, [{"messages": messages} for group in groups.values() for messages in group])
        texts = [message["content"] for chat in chats for message in chat]
        tokenizer = train_tokenizer(texts, 400)
        if form := form_of(name):
            tokenizer = in_form(tokenizer, form)
        config = preset_config("preset:tiny")
        config.vocab_size = len(tokenizer)
        for part in (tokenizer, config):
            part.save_pretrained(folder / "base")
        trainer = {"max_steps": 200, "use_cpu": True, "save_strategy": "no", "logging_steps": 50}
        options = {"batch_size": 20, "grad_accum": 1, "learning_rate": 4e-3}
        run = stepjepa.run(
            stepjepa.RunConfig(
                model_name=str(folder / "base"),
                pretrain=True,
                train_file=str(training),
                output_dir=str(folder / "run"),
                jepa=stepjepa.JepaConfig(mode="regular"),
                trainer=trainer,
                **options,
            )
        )
        assert main(["export", "--model_path", str(folder / "run"), "--output_dir", str(folder / "exported")]) == 0
        scores = {group: run.evaluate(file, task="generic", max_new_tokens=NEW) for group, file in files.items()}
        return Trained(run, folder / "exported", files, {group: each.lines for group, each in scores.items()})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Models:
    return Models(tmp_path_factory.mktemp("models"), shared_data / "llm_jepa" / "synth_test.jsonl")


def assert_worth_comparing(trained: Trained, name: str) -> None:
    """The answers differ, have several tokens and mostly end by themselves."""
    lines = trained.lines[name]
    assert len({str(line["generated"]) for line in lines}) > len(lines) // 3
    assert sum(bool(line["stopped"]) for line in lines) > len(lines) // 2
    assert all(trained.contents(name))


# -- transformers serve ------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """``transformers serve`` for one folder."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    @property
    def answered(self) -> int:
        """Number of requests for an answer that it took."""
        return self.log.read_text(encoding="utf-8", errors="replace").count("POST /v1/chat/completions")


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[Server]:
    """Serve a folder on a free loopback port; the server is ended at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    cache_folder = log.parent / "hub"
    cache_folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache_folder), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
    try:
        await_health(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(process, f"http://127.0.0.1:{port}/v1", log)
    finally:
        process.kill()
        process.wait()


def await_health(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")[-2000:]
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not come up")


def ask(server: Server, trained: Trained, name: str, output: Path, **changes: object) -> list[dict[str, object]]:
    settings = {"task": "generic", "max_new_tokens": NEW, "server_model": str(trained.folder), **changes}
    return stepjepa.evaluate(None, trained.files[name], output_file=output, server=server.address, **settings).lines


@needs_serving
def test_transformers_serve_answers_as_the_built_in_engine(models: Models, tmp_path: Path) -> None:
    """Forty records, and forty with an earlier turn; also as rendered prompts."""
    trained = models["chatml"]
    with serving(trained.folder, tmp_path / "log") as server:
        for name in ("single", "multi"):
            assert_worth_comparing(trained, name)
            lines = ask(server, trained, name, tmp_path / f"{name}.jsonl")
            same = ("generated", "stopped", "new_tokens", "scores", "truth")
            assert len(lines) == 40
            assert [{key: line[key] for key in same} for line in lines] == [
                {key: line[key] for key in same} for line in trained.lines[name]
            ]
        model, output = os.fspath(trained.run.folder), tmp_path / "rendered.jsonl"
        options = {"task": "generic", "max_new_tokens": NEW, "server_model": str(trained.folder), "completions": True}
        rendered = stepjepa.evaluate(
            model, trained.files["single"], output_file=output, server=server.address, max_examples=7, **options
        )
        whole = trained.lines["single"][:7]
        assert [(line["generated"], line["prompt"]) for line in rendered.lines] == [
            (line["generated"], line["prompt"]) for line in whole
        ]
        # What this server does not know it refuses, and says what.
        with pytest.raises(UserError, match=r"single\.jsonl:\d+: http.* answered with status 422: .*top_k"):
            ask(server, trained, "single", tmp_path / "k.jsonl", temperature=0.5, top_k=3, max_examples=1)


@needs_serving
@needs_trl
def test_transformers_serve_answers_in_qwen3s_form(models: Models, tmp_path: Path) -> None:
    """With a thought, which is empty here, in front of every answer."""
    trained = models["qwen3"]
    assert_worth_comparing(trained, "single")
    with serving(trained.folder, tmp_path / "log") as server:
        lines = ask(server, trained, "single", tmp_path / "out.jsonl")
    assert len(lines) == 20
    assert [content_of(line["generated"]) for line in lines] == trained.contents("single")
    assert [line["scores"] for line in lines] == [line["scores"] for line in trained.lines["single"]]


@needs_serving
def test_killed_in_the_middle_nothing_is_lost_or_asked_twice(models: Models, tmp_path: Path) -> None:
    """First the evaluation is killed, then the server, which comes back at another port."""
    trained, output, log = models["chatml"], tmp_path / "out.jsonl", tmp_path / "log"

    def written() -> int:
        return output.read_text(encoding="utf-8").count("\n") if output.exists() else 0

    with serving(trained.folder, log) as server:
        flags = ["--test_file", trained.files["single"], "--output_file", output, "--task", "generic"]
        flags += ["--max_new_tokens", NEW, "--server", server.address, "--server_model", trained.folder]
        process = start([*map(str, ["evaluate", *flags, "--concurrency", 1])], tmp_path / "killed")
        while written() < 5:
            assert process.exitcode is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert status(process) == -signal.SIGKILL
        first = written()
        assert 5 <= first < 40
        # At most the one on its way was answered for nobody.
        assert server.answered - first in (0, 1)
        process = start([*map(str, ["evaluate", *flags, "--concurrency", 1, "--retries", 1])], tmp_path / "orphan")
        while written() < first + 5:
            assert process.exitcode is None
            time.sleep(0.01)
        server.process.kill()
        assert status(process) == 2
        error = (tmp_path / "orphan").read_text(encoding="utf-8")
        second = written()
        assert first + 5 <= second < 40
        assert "broke the connection or is gone" in error
        assert f"{second} of 40 answers are in {output}" in error
    with serving(trained.folder, log) as server:
        lines = ask(server, trained, "single", output)
        assert server.answered <= 40 + 2
    assert [line["generated"] for line in lines] == [line["generated"] for line in trained.lines["single"]]


# -- pipeline and lm-eval ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_pipeline_of_transformers_gives_the_same_answers(name: str, models: Models) -> None:
    from transformers import pipeline

    trained = models[name]
    assert_worth_comparing(trained, "single")
    speak = pipeline("text-generation", model=str(trained.folder), device="cpu", dtype=torch.float32)
    answers = []
    for line in trained.files["single"].read_text(encoding="utf-8").splitlines()[:20]:
        chat = json.loads(line)["messages"][:-1]
        (output,) = speak(chat, max_new_tokens=NEW, do_sample=False)
        answers.append(content_of(output["generated_text"][-1]["content"]))
    assert answers == trained.contents("single")[:20]


TASK = """
task: synth_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{file}'}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{messages[-2]['content']}}}}"
doc_to_target: "{{{{messages[-1]['content']}}}}"
generation_kwargs: {{until: [], max_gen_toks: {new}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
"""Without ``until: []`` lm-eval cuts answers at a blank line."""


@needs_lm_eval
@pytest.mark.parametrize("name", FORMATS)
def test_lm_eval_gives_the_same_answers(name: str, models: Models, tmp_path: Path) -> None:
    trained = models[name]
    file = tmp_path / "test.jsonl"
    file.write_text(
        "".join(trained.files["single"].read_text(encoding="utf-8").splitlines(True)[:20]), encoding="utf-8"
    )
    (tmp_path / "task.yaml").write_text(TASK.format(file=file, new=NEW), encoding="utf-8")
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", "synth_local", "--device", "cpu"]
    command += ["--model_args", f"pretrained={trained.folder},dtype=float32", "--include_path", str(tmp_path)]
    command += ["--apply_chat_template", "--system_instruction", SYSTEM, "--batch_size", "5"]
    command += ["--log_samples", "--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    answers = {}
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        ((answers[sample["doc_id"]],),) = sample["resps"]
    assert [content_of(answers[index]) for index in range(20)] == trained.contents("single")[:20]
