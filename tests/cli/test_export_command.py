"""``stepjepa export``: plain folders, on a hub if asked for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tiny
from fake_hub import FakeHub
from stepjepa.base.files import locked, write_jsonl
from stepjepa.cli.main import main
from stepjepa.models import generation_settings
from stepjepa.models.presets import CHAT_TEMPLATE
from stepjepa.store.fingerprint import model_fingerprint
from stepjepa.store.folder import CHECKSUMS_FILE

# The hub's library sends large files in an old way of its HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

# What vLLM, llama.cpp's converter and others read; a second file of weights would confuse them.
PLAIN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
PLAIN |= {"chat_template.jinja", "README.md"}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory, plain_tokenizer: Any) -> Path:
    """``base`` without spare rows, ``run`` with a predictor head, two adapters, and data."""
    folder = tmp_path_factory.mktemp("export")
    write_jsonl(folder / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    tiny.make_model("qwen3", vocab_size=len(plain_tokenizer)).save_pretrained(folder / "base")
    plain_tokenizer.save_pretrained(folder / "base")
    fixed = ["--model_name", str(folder / "base"), "--train_file", str(folder / "data.jsonl"), "--use_cpu"]
    fixed += ["--max_steps", "2", "--learning_rate", "0.01", "--save_strategy", "no", "--predictors", "2"]
    arms = {"run": ["--predictor_head", "linear"], "adapter": ["--lora", "--lora_rank", "3", "--use_dora"]}
    for name, flags in arms.items():
        assert main(["train", *fixed, "--output_dir", str(folder / name), *flags]) == 0
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.serve(monkeypatch)
        yield hub


def export(*flags: object) -> int:
    return main(["export", *map(str, flags)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["run", "adapter"])
def test_a_plain_folder(name: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export("--model_path", material / name, "--output_dir", tmp_path / "plain") == 0
    output = capsys.readouterr().out
    assert "needs transformers 5" in output
    assert "served: 3 turns: their prompts are those of plain apply_chat_template, and generation" in output
    assert "(records of data.jsonl)" in output
    assert {path.name for path in (tmp_path / "plain").iterdir()} == PLAIN | {"run.json", "trained_prompts.json"}
    base = AutoConfig.from_pretrained(material / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert plain.config.vocab_size == base.vocab_size + 2
    tokenizer, first = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "plain", material / "base"))
    assert len(tokenizer) == len(first) + 2
    assert tokenizer("3+4=7.\n\nSo it is").input_ids == first("3+4=7.\n\nSo it is").input_ids
    assert "predictor_1" in (tmp_path / "plain" / "README.md").read_text(encoding="utf-8")


def test_a_second_export_into_a_folder_is_refused_while_the_first_runs(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / "plain"):
        assert export("--model_path", material / "run", "--output_dir", tmp_path / "plain") == 2
    assert re.search(r"plain: is in use by process \d+ on .*; wait for it or stop it", capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_named_chat_templates_leave_with_the_model(material: Path, tmp_path: Path) -> None:
    """A base's further templates, as one for retrieved documents, are in run, checkpoint and export."""
    base = AutoTokenizer.from_pretrained(material / "base")
    named = {"default": CHAT_TEMPLATE, "tool_use": f"tools {CHAT_TEMPLATE}", "rag": "{{ documents }}"}
    base.chat_template = named
    shutil.copytree(material / "base", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    base.save_pretrained(tmp_path / "base")
    files = ["--model_name", str(tmp_path / "base"), "--train_file", str(material / "data.jsonl")]
    flags = ["--use_cpu", "--max_steps", "1", "--regular", "--save_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert main(["train", *files, *flags]) == 0
    assert export("--model_path", tmp_path / "run", "--output_dir", tmp_path / "plain") == 0
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1", tmp_path / "plain"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == named
    before = model_fingerprint(tmp_path / "plain")
    (tmp_path / "plain" / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    assert model_fingerprint(tmp_path / "plain") != before


def test_an_export_is_evaluated_as_its_run_is(material: Path, tmp_path: Path) -> None:
    assert export("--model_path", material / "run", "--output_dir", tmp_path / "plain") == 0
    answers = []
    for folder, file in ((material / "run", "a.jsonl"), (tmp_path / "plain", "b.jsonl")):
        test = ["--test_file", str(material / "data.jsonl"), "--output_file", str(tmp_path / file)]
        assert main(["evaluate", "--model_path", str(folder), *test, "--max_new_tokens", "5"]) == 0
        answers.append([json.loads(line)["generated"] for line in (tmp_path / file).read_text().splitlines()])
    assert answers[0] == answers[1]


def test_a_run_of_an_earlier_version_may_name_a_variable_that_the_template_does_not_read(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run with it is refused, so nobody can leave it out later."""
    run = tmp_path / "run"
    shutil.copytree(material / "run", run)
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    record["jepa"]["chat_template_kwargs"] = {"enable_thinking": False}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    data, variables = str(material / "data.jsonl"), '{"enable_thinking": false}'
    assert export("--model_path", run, "--output_dir", tmp_path / "plain") == 0
    evaluation = ["--output_file", str(tmp_path / "test.jsonl"), "--max_new_tokens", "2", "--max_examples", "2"]
    assert main(["evaluate", "--model_path", str(run), "--test_file", data, *evaluation, "--retrieval"]) == 0
    fixed = ["--model_name", str(material / "base"), "--train_file", data, "--chat_template_kwargs", variables]
    for command in (["train", "--use_cpu", "--max_steps", "1", "--output_dir", str(tmp_path / "new")], ["inspect"]):
        capsys.readouterr()
        assert main([*command, *fixed]) == 2
        assert (
            "the chat template has no variable 'enable_thinking' that can be set; leave it out"
            in capsys.readouterr().err
        )


def test_to_a_hub(material: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--push_to_hub", "me/mine", "--hub_private_repo"]
    assert export("--model_path", material / "adapter", "--output_dir", tmp_path / "plain", *more) == 0
    assert capsys.readouterr().out.endswith(f"uploaded: {hub.endpoint}/me/mine\n")
    # run.json names folders of this machine, and is for 'stepjepa evaluate' here.
    assert hub.names("me/mine") == PLAIN
    assert hub.made["me/mine"]["visibility"] == "private"
    for name in PLAIN:
        assert hub.files["me/mine", "main", name] == (tmp_path / "plain" / name).read_bytes()
    card = hub.files["me/mine", "main", "README.md"].decode()
    assert "name = 'me/mine'" in card
    assert "A causal language model, trained from `base`" in card


def test_a_dry_run_lists_what_an_upload_sends(material: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model_path", material / "run", "--push_to_hub", "me/mine"]
    before = sorted((material / "run").iterdir())
    assert export(*run, "--dry_run") == 0
    *files, total = capsys.readouterr().out.splitlines()
    assert total.startswith(f"dry run: {len(files)} files, ") and "would go to me/mine" in total
    assert hub.requests == [] and sorted((material / "run").iterdir()) == before
    assert export(*run) == 0
    assert hub.names("me/mine") == {line.partition("  ")[0] for line in files} | {"README.md"}


def test_saved_files_have_the_permissions_of_the_umask(material: Path, tmp_path: Path) -> None:
    """safetensors makes files that only their owner can read."""
    (tmp_path / "plain file").write_text("")
    usual = (tmp_path / "plain file").stat().st_mode
    assert export("--model_path", material / "run", "--output_dir", tmp_path / "plain") == 0
    for folder in (tmp_path / "plain", material / "run"):
        modes = {file.name: file.stat().st_mode for file in folder.iterdir() if file.is_file()}
        assert {*modes.values()} == {usual} and "model.safetensors" in modes


@pytest.mark.parametrize("step", ["create", "commit"])
def test_a_hub_that_refuses_costs_nothing(
    step: str, material: Path, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuse = step
    assert export("--model_path", material / "run", "--output_dir", tmp_path / "plain", "--push_to_hub", "me/mine") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "403" in message
    assert ("to try again: stepjepa export --model_path" in message) == (step == "commit")
    assert hub.commits == []
    # A repository that can't be made is told before a model is loaded; otherwise the exported folder can be uploaded.
    assert (tmp_path / "plain").exists() == (step == "commit")
    hub.refuse = None
    if step == "commit":
        assert export("--model_path", tmp_path / "plain", "--push_to_hub", "me/mine") == 0
        assert hub.names("me/mine") == PLAIN


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--output_dir is missing"),
        (["--hub_revision", "dev", "--output_dir", "x"], "--hub_revision does nothing without --push_to_hub"),
        (["--push_to_hub", "me/mine", "--dtype", "float16"], "--dtype does nothing without --output_dir"),
        (["--output_dir", "x", "--dry_run"], "--dry_run does nothing without --push_to_hub"),
        (["--push_to_hub", "me/mine"], "the adapter's base model is a folder of this machine"),
        (["--push_to_hub", "me/mi ne", "--output_dir", "x"], "can't make the repository 'me/mi ne' on the hub"),
    ],
)
def test_flags_that_can_not_be(
    flags: list[str], words: str, material: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("--model_path", material / "adapter", *flags) == 2
    assert words in capsys.readouterr().err
    assert hub.requests == []


def test_a_file_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    assert export("--model_path", tmp_path / "model.gguf", "--output_dir", tmp_path / "new") == 2
    assert "model.gguf: is a file; name the folder of a run or of a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.fixture
def dated(material: Path, tmp_path: Path) -> Path:
    """A run whose template writes today's date, as runs of 0.2.0 may have it."""
    run = shutil.copytree(material / "run", tmp_path / "run")
    (run / CHECKSUMS_FILE).unlink()
    template = run / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    return run


def test_what_an_earlier_version_did_not_save_is_exported(dated: Path, tmp_path: Path) -> None:
    assert export("--model_path", dated, "--output_dir", tmp_path / "plain") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)
    assert asked.startswith("2024<|im_start|>")


@pytest.mark.parametrize(
    ("owner", "name", "value", "fault"),
    [
        (
            1,
            "chat_template",
            "{{ strftime_now('%Y') }}" + CHAT_TEMPLATE,
            "line 1, message 3: plain apply_chat_template",
        ),
        (0, "eos_token_id", 5, "lacks '<|im_end|>'"),
    ],
    ids=["template", "stop"],
)
def test_a_folder_that_would_be_asked_otherwise_is_not_exported(
    owner: int,
    name: str,
    value: Any,
    fault: str,
    material: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_it_came(model: Any, tokenizer: Any, **settings: Any) -> None:
        setattr((model.generation_config, tokenizer)[owner], name, value)

    monkeypatch.setattr(generation_settings, "serve_as_trained", as_it_came)
    assert export("--model_path", material / "run", "--output_dir", tmp_path / "plain") == 2
    output = capsys.readouterr().err
    assert "it would not be served as it was trained (records of data.jsonl, " in output
    assert fault in output
    assert not [*tmp_path.iterdir()]


def test_without_the_training_file_chats_are_made_up(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(material / "run", tmp_path / "run")
    text = (run / "run.yaml").read_text(encoding="utf-8")
    (run / "run.yaml").write_text(text.replace("data.jsonl", "gone.jsonl"), encoding="utf-8")
    assert export("--model_path", run, "--output_dir", tmp_path / "plain") == 0
    assert "served: 2 turns: " in (output := capsys.readouterr().out)
    assert "(made-up chats, since the training file is not here)" in output


def test_a_folder_that_is_uploaded_as_it_is_is_compared_too(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], hub: FakeHub
) -> None:
    run = shutil.copytree(material / "run", tmp_path / "run")
    assert export("--model_path", run, "--push_to_hub", "someone/model") == 0
    assert "served: 3 turns" in capsys.readouterr().out
    template = "{{ strftime_now('%Y') }}" + CHAT_TEMPLATE
    (run / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert export("--model_path", run, "--push_to_hub", "someone/model") == 0
    assert "would not be served as it was trained" in capsys.readouterr().err
