"""``stepjepa inspect`` from the command line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import chat_templates
from stepjepa.cli.main import main

ANSWERS = ("3+4=7.\n\n7+5=12\n\nSo it is\n\n12", "Red\n\nBlue")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    chats = [
        [{"role": "user", "content": "What is 3+4+5?"}, {"role": "assistant", "content": answer}] for answer in ANSWERS
    ]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats), encoding="utf-8")
    return path


def _inspect(data: Path, *flags: str) -> int:
    return main(["inspect", "--train_file", str(data), "--model_name", "preset:tiny", *flags])


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("regular", ["--regular"]),
        ("llm-jepa", ["--layout", "branched", "--predictors", "3"]),
        ("step-jepa", ["--step_jepa", "--layout", "inplace"]),
    ],
)
def test_json_is_one_document(data: Path, capsys: pytest.CaptureFixture[str], mode: str, flags: list[str]) -> None:
    assert _inspect(data, "--json", "--index", "1", *flags) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["model"], value["path"], value["index"]) == ("preset:tiny", str(data), 1)
    assert [record["line"] for record in value["records"]] == [2]
    assert [token["place"] for token in value["tokens"]] == list(range(len(value["tokens"])))
    assert value["branches"][-1]["end"] == len(value["tokens"])
    assert value["config"]["mode"] == mode
    assert bool(value["records"][0]["pairs"]) == (mode != "regular")
    assert value["file"]["counts"]["records"] == 2
    assert value["template"]["end of turn"] == "'<|im_end|>'"


def test_several_records_are_one_tree(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flags in ([], ["--index", "1"], ["--records", "5"], ["--records", "2", "--share_prefixes", "off"]):
        assert _inspect(data, "--json", "--regular", *flags) == 0
        shown.append(json.loads(capsys.readouterr().out))
    first, second, both, apart = (len(value["tokens"]) for value in shown)
    assert [record["line"] for record in shown[2]["records"]] == [1, 2]
    assert first + second == apart > both
    assert {branch["kind"] for branch in shown[2]["branches"]} == {"shared", "main"}


@pytest.mark.slow
def test_a_picture_is_written_and_never_over_another(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "attention.png"
    assert _inspect(data, "--step_jepa", "--json", "--png", str(picture)) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert f"wrote {picture}" in captured.err
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert _inspect(data, "--step_jepa", "--png", str(picture)) == 2
    assert "already exists; name another file or pass --overwrite" in capsys.readouterr().err
    assert _inspect(data, "--step_jepa", "--png", str(tmp_path / "attention.txt")) == 2
    assert "--png draws .png or .svg; end its name in one of them" in capsys.readouterr().err


def test_what_training_would_refuse_is_noted_in_the_words_of_the_shell(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _inspect(data, "--max_length", "30") == 0
    noted = capsys.readouterr().err
    assert f"note: would be refused by train: {data}:1: the record has " in noted
    assert "more than max_length 30; raise --max_length" in noted
    flags = ["--train_file", str(data), "--output_dir", str(tmp_path / "run"), "--max_length", "30", "--use_cpu"]
    assert main(["train", "--model_name", "preset:tiny", *flags]) == 2
    # The same words.
    assert noted.strip().partition("train: ")[2] == capsys.readouterr().err.strip().partition("error: ")[2]


def test_a_record_that_is_left_out_is_named_and_the_others_are_shown(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the command, whichever record it was."""
    assert _inspect(data, "--regular", "--records", "2", "--max_length", "36", "--over_length", "skip") == 0
    captured = capsys.readouterr()
    assert f"note: {data}:1 is not shown: the record has more tokens than max_length 36, and training" in captured.err
    assert captured.out.startswith("sums.jsonl · line 2 · regular")
    assert _inspect(data, "--regular", "--records", "1", "--max_length", "36", "--over_length", "skip") == 2
    assert f"{data}:1: the record has more tokens than max_length 36" in capsys.readouterr().err


def test_tools_that_the_template_does_not_write_are_noted_in_front(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = json.loads(data.read_text(encoding="utf-8").splitlines()[0])["messages"]
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    data.write_text(json.dumps({"messages": chat, "tools": [{"type": "function", "function": function}]}))
    assert _inspect(data, "--regular") == 0
    captured = capsys.readouterr()
    assert captured.err == "note: not used: tools; the template writes none\n"
    assert "not used" not in captured.out


def test_the_text_is_written_at_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `head` behind it does not end it with exit code 1 where output is not buffered."""
    written: list[str] = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    assert _inspect(data, "--regular") == 0
    assert [each for each in written if each] == written[:1]
    assert written[0].endswith("date: none\n")


def test_a_record_that_is_not_there(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _inspect(data, "--index", "2") == 2
    assert capsys.readouterr().err.endswith("sums.jsonl: --index 2: the file has 2 records; choose 0 to 1\n")


@pytest.mark.slow
def test_other_tokenizers(shared_data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = shared_data / "llm_jepa" / "synth_test.jsonl"
    data = tmp_path / "synth.jsonl"
    data.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:20]), encoding="utf-8")
    for name in ("minimind", "olmo2", "qwen2.5"):
        assert _inspect(data, "--json", "--model_name", str(shared_data / "tokenizers" / name)) == 0
        value = json.loads(capsys.readouterr().out)
        main = [place for start, end in value["sequences"][0]["places"] for place in range(start, end)]
        shown = "".join(value["tokens"][place]["text"] for place in main)
        question = json.loads(data.read_text(encoding="utf-8").splitlines()[0])["messages"][-2]["content"]
        assert question.strip() in shown


@pytest.fixture
def thinking(tmp_path: Path) -> tuple[Path, Path]:
    """A template whose prompt depends on a variable, and a chat with a thought of two steps."""
    template = tmp_path / "thinking.jinja"
    closed = "{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}"
    template.write_text(chat_templates.THINKING.removesuffix("{% endif %}") + closed + "{% endif %}", encoding="utf-8")
    chat = [
        {"role": "user", "content": "What is 3+4+5?"},
        {"role": "assistant", "content": "12", "reasoning_content": "3+4=7.\n\n7+5=12"},
    ]
    path = tmp_path / "thoughts.jsonl"
    path.write_text(json.dumps({"messages": chat}), encoding="utf-8")
    return template, path


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_steps_of_a_thought(command: str, thinking: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    template, path = thinking
    flags = ["--train_file", str(path), "--model_name", "preset:tiny", "--chat_template", str(template), "--step_jepa"]
    assert main([command, *flags, "--steps_from", "reasoning", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    if command == "inspect":
        assert [step["text"] for step in result["records"][0]["steps"]] == ["3+4=7.\n\n", "7+5=12"]
    else:
        assert (
            "1 of 1 records have pairs" in {each["name"]: each["detail"] for each in result["checks"]}["pairs of views"]
        )
    # The content has one step.
    assert main([command, *flags, "--json"]) == (0 if command == "inspect" else 1)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_variables_of_the_template(
    command: str, thinking: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    template, path = thinking
    flags = ["--train_file", str(path), "--model_name", "preset:tiny", "--chat_template", str(template), "--regular"]
    assert main([command, *flags, "--chat_template_kwargs", '{"enable_thinking": true}']) == 0
    capsys.readouterr()
    assert main([command, *flags, "--chat_template_kwargs", '{"enable_thinking": false}']) == 2
    assert "the prompt closes the thought already" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "train"])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "no such chat template; check the path"),
        (b"{% for %}", "the chat template can't be read: line 1: Expected an expression"),
        (b"\xff\xfe", "the chat template is not UTF-8 text; save it as UTF-8"),
    ],
    ids=["missing", "no Jinja", "no UTF-8"],
)
def test_a_wrong_template_is_refused_before_the_records_are_read(
    command: str, content: bytes | None, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, template = tmp_path / "data.jsonl", tmp_path / "own.jinja"
    data.write_text("no record\n", encoding="utf-8")
    if content is not None:
        template.write_bytes(content)
    flags = ["--train_file", str(data), "--model_name", "preset:tiny", "--chat_template", str(template)]
    flags += ["--output_dir", str(tmp_path / "run")] if command == "train" else []
    assert main([command, *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"stepjepa {command}: error: {template}: {fault}")


def test_data_sets_are_read_as_in_training(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for split, number in (("train", 0), ("test", 1)):
        (folder / f"{split}.jsonl").write_text(data.read_text(encoding="utf-8").splitlines()[number], encoding="utf-8")
    sources = ["--dataset", f"{folder}::test", str(data), "--model_name", "preset:tiny"]
    assert main(["inspect", *sources, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["path"], value["file"]["counts"]["records"]) == (str(folder / "test.jsonl"), 3)
    assert main(["verify", *sources, "--max_records", "1", "--regular"]) == 0
    assert f"data {folder}::test + {data}, mode regular" in capsys.readouterr().out
    assert main(["inspect", "--model_name", "preset:tiny"]) == 2
    assert "name the data with one of --train_file and --dataset" in capsys.readouterr().err
