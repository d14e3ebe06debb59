"""Every example runs from end to end in its smallest size, and its result is right."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

import stepjepa
from stepjepa.data.sources import read_records
from stepjepa.store.record import trained_objective

sys.path.append(str(Path(__file__).parents[2] / "docs" / "site"))

import tour

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARED = {"shown.py", "sentence_steps.py", "smollm2.py"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in SHARED)

Load = Callable[[str], ModuleType]


def config_of(folder: Path) -> dict[str, Any]:
    objective = trained_objective(folder)
    assert objective is not None
    return objective


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \[(\S+?)\]", table, re.MULTILINE))
    assert named == {*SCRIPTS, *(path.name for path in EXAMPLES.glob("*.ipynb"))}


@pytest.mark.slow
def test_quickstart(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = load("quickstart")
    step = quickstart.step
    # Answers of so little training do not end by themselves.
    short = lambda name, line, *rest, **more: step(name, line.replace("_tokens 64", "_tokens 5"), *rest, **more)  # noqa: E731
    monkeypatch.setattr(quickstart, "step", short)
    size = quickstart.size_of("", full=True, tiny=True)
    output = quickstart.Quickstart(tmp_path / "a", replace(size, seeds=(82, 23), full=True)).run()
    printed = capsys.readouterr().out
    # One line a command, the ending, and the last line.
    assert re.search(r"^train infonce-23 +\d+ s$", printed, re.MULTILINE)
    assert len(printed.splitlines()) < len(output.splitlines()) + 30
    assert "$ stepjepa train " in (tmp_path / "a" / "log.txt").read_text(encoding="utf-8")
    table = output.rpartition("plain training.\n\n")[2]
    for arm in ("plain", "cosine", "infonce", "plain-longer"):
        for name in (arm, f"{arm}, linear map") if arm.startswith("plain") else (arm,):
            assert re.search(rf"^  {name} +[\d.]+%", output, re.MULTILINE)
        assert config_of(tmp_path / "a" / f"{arm}-82")["jepa_loss_type"] == (
            "infonce" if arm == "infonce" else "cosine"
        )
        assert re.search(rf"^{arm}( +[\d.]+){{6}}$", table, re.MULTILINE)
        assert table.count(f"  {arm}: ") == 3
    assert "The runs are not compared" not in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(r"^  [* ] -?\d\.\d{3}  ", output, re.MULTILINE)) == 9
    assert "Of 2 step problems" in output
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- quickstart -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    quickstart.paste(page, "quickstart", "new")
    assert page.read_text(encoding="utf-8") == "before\n<!-- quickstart -->\n```text\nnew\n```\n<!-- end -->\nafter\n"
    with pytest.raises(SystemExit, match="has no lines <!-- quickstart full -->"):
        quickstart.paste(page, "quickstart full", "new")


def test_a_step_prints_one_line_and_its_notes_are_in_the_log(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, log = load("shown"), tmp_path / "log.txt"

    def command(words: list[str], path: Path | None) -> int:
        print("a result")
        print(f"about {words}", file=sys.stderr)
        return int(words[0] == "wrong")

    monkeypatch.setattr(shown, "stepjepa", command)
    shown.step("first", "right a", log)
    assert re.fullmatch(r"first {23} +0 s\n", capsys.readouterr().out)
    assert log.read_text(encoding="utf-8") == "$ stepjepa right a\na result\nabout ['right', 'a']\n"
    with pytest.raises(SystemExit) as ending:
        shown.step("second", "wrong b", log)
    # Why it failed is on the terminal, too.
    assert ending.value.code == 1 and capsys.readouterr().err == "about ['wrong', 'b']\n"
    # Bars stand between the two lines of a step on a terminal.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown.step("third", "right c", log)
    printed = capsys.readouterr()
    assert re.fullmatch(r"third +\nthird {23} +0 s\n", printed.out) and printed.err == "about ['right', 'c']\n"


def test_threads_are_no_more_than_free_cores(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    use_free_cores, chosen = load("shown").use_free_cores, []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)), raising=False)
    for load_of_a_minute in (0.2, 2.7, 30.0):
        monkeypatch.setattr("os.getloadavg", lambda value=load_of_a_minute: (value, 0.0, 0.0))
        use_free_cores()
    assert chosen == [7, 4, 1]


@pytest.mark.slow
def test_one_model_answers_and_retrieves(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("answer_or_retrieve")
    shown = example.run(tmp_path / "a", tiny=True)
    known, test = (read_records(tmp_path / "a" / f"nl-rx-{name}.jsonl") for name in ("train", "test"))
    answers = {record.answer for record in known}
    # Three questions with five known expressions each, and one screen in all.
    assert len(shown.splitlines()) < 40
    hits = re.findall(r"^    finds (-?[\d.]+): +(\S+)(  <- right)?$", shown, re.MULTILINE)
    assert len(hits) == 15 and {text for _, text, _ in hits} <= answers
    for number, (_, text, mark) in enumerate(hits):
        assert bool(mark) == example.is_right(text, test[number // 5].answer)
    scores = [float(score) for score, *_ in hits]
    assert all(scores[at : at + 5] == sorted(scores[at : at + 5], reverse=True) for at in (0, 5, 10))
    jepa = stepjepa.Jepa.from_pretrained(tmp_path / "a" / "model")
    example.draw({"a": jepa, "b": jepa}, known[:7], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "evaluated", "made"),
    [
        ("llm_jepa_lora", ["adapter-llm-jepa", "adapter-regular", "base"], "merged/model.safetensors"),
        ("pretrain_finetune", ["after-llm-jepa", "after-none", "after-regular"], "data"),
        (
            "sweep_and_compare",
            [f"{arm}/seed{seed}" for arm in ("regular", "step-jepa") for seed in (23, 82)],
            "report.html",
        ),
    ],
)
def test_an_example_trains_and_evaluates(
    name: str, evaluated: list[str], made: str, load: Load, tmp_path: Path
) -> None:
    load(name).run(tmp_path / "a", tiny=True)
    result = sorted(str(path.parent.relative_to(tmp_path / "a")) for path in tmp_path.rglob("*.summary.json"))
    assert [each.removeprefix("sweep/") for each in result] == evaluated
    assert (tmp_path / "a" / made).exists()


def test_labels_of_the_generated_reviews_are_right(load: Load) -> None:
    example = load("pretrain_finetune")
    words = {good: [set(row) for row in (example.GOOD if good else example.BAD)] for good in (True, False)}
    known = {word for rows in words.values() for row in rows for word in row}
    for row in example.reviews(random.Random(2), 200):
        # What is denied is the opposite.
        claimed = set(re.findall(r"\w+", re.sub(r"nobody could call .* :", "", row["text"]))) & known
        assert len(claimed) == 2
        assert any(claimed <= each for each in words[bool(row["label"])])


@pytest.mark.slow
def test_own_views(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("own_views")
    example.run(tmp_path / "a", tiny=True)
    record = read_records(tmp_path / "a" / "data" / "train.jsonl")[0]
    views = example.with_views(record)
    assert views["text"] in record.messages[-2]["content"]
    assert record.answer.endswith(views["code"])
    table = capsys.readouterr().out.partition("held-out records")[2].splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["lbd", "0.0"], ["lbd", "0.1"]]


@pytest.mark.slow
def test_own_splitter(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("own_splitter").run(tmp_path / "a", tiny=True)
    assert "fewer than two steps: 8" in capsys.readouterr().err
    record = read_records(tmp_path / "a" / "train.jsonl")[0]
    assert [step.split()[0] for step in record.answer.split("\n\n")] == ["First,", "Next,", "Finally,"]
    assert config_of(tmp_path / "a" / "step-jepa")["mode"] == "step-jepa"
    split = load("sentence_steps").split
    assert split("First, 2. Next, 3! Finally, 4.") == ["First, 2.", "Next, 3!", "Finally, 4."]
    # Not where the word stands within a sentence.
    assert split("He asks who is Next, then goes.") == ["He asks who is Next, then goes."]


def test_a_command_that_fails_ends_the_example(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    command = load("shown").command
    with pytest.raises(SystemExit) as ended:
        command("report nowhere")
    assert ended.value.code == 2
    command("report nowhere", expected=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--picture a.png", "files, pictures and documents need --model_path"),
        ("--model_path a --known_file b", "--model_path needs --known_file and --test_file"),
        ("--model_path a --known_file b --test_file c --picture d", "--picture and --plain_path need each other"),
    ],
)
def test_arguments_without_effect_are_refused(
    flags: str, words: str, load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["answer_or_retrieve.py", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        load("answer_or_retrieve").read_arguments(load("shown").parser("Help.", "a"))
    assert words in capsys.readouterr().err


def test_an_error_of_the_user_is_one_line(load: Load) -> None:
    with pytest.raises(SystemExit, match=r"^error: nowhere\.jsonl: no such data file"), load("shown").user_errors():
        read_records("nowhere.jsonl")


def test_nothing_is_overwritten(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder = load("shown").new_folder
    with pytest.raises(SystemExit, match="already exists; name another --output_dir"):
        new_folder("a", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a-1").mkdir(parents=True)
    assert new_folder("a") == Path("runs/a-2")


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)


def _check_outputs(notebook: nbformat.NotebookNode) -> None:
    """Three searches with three hits each, the first table of a comparison, four pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert len(re.findall(r"(?m)^  [* ] -?\d\.\d{3}  ", printed)) == 9
    assert re.search(r"(?m)^arm +runs +right answers ", printed)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4


def test_the_notebook_is_stored_with_the_outputs_of_its_cells(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    assert notebook.metadata[tour.KEY] == tour.fingerprint(notebook), "its cells have changed; run `make tour`"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    _check_outputs(notebook)
    texts = [output.get("text", "") for cell in cells for output in cell.outputs]
    assert not re.search(r"(?<![\w./])/\w+/", "".join(texts)), "a path of the machine that ran it"
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)


# Its kernel's channels are closed late.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_the_notebook_runs(notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert "TINY = False" in parameters.source
    parameters.source = parameters.source.replace("TINY = False", "TINY = True")
    # A kernel of this interpreter, whatever kernels a user has, and nothing of theirs.
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    for cell in notebook.cells:
        cell.pop("outputs", None)
        cell.update({"outputs": []} if cell.cell_type == "code" else {})
    tour.execute(notebook, tmp_path)
    _check_outputs(notebook)
    assert (tmp_path / "runs" / "tour-1" / "infonce-23" / "test.summary.json").exists()
