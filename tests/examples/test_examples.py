"""Every example runs from end to end in its smallest size, and says what it should."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepjepa.data.sources import read_records
from stepjepa.run_folder import run_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARED = {"shown.py", "sentence_steps.py", "smollm2.py"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in SHARED)

Load = Callable[[str], ModuleType]
Summaries = Callable[[Path], dict[str, Any]]


def config_of(folder: Path) -> dict[str, Any]:
    run = run_of(str(folder))
    assert run is not None
    return run["jepa"]


def test_quickstart(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = load("quickstart")
    size = quickstart.size_of("", full=True, tiny=True)
    quickstart.run(tmp_path / "a", replace(size, seeds=(82, 23), equal_flops=True))
    said = capsys.readouterr().out
    table = said.rpartition("over plain training.\n")[2]
    for arm in ("plain", "cosine", "infonce", "plain-longer"):
        assert config_of(tmp_path / "a" / f"{arm}-82")["jepa_loss_type"] == (
            "infonce" if arm == "infonce" else "cosine"
        )
        assert re.search(rf"^{arm}( +[\d.]+){{6}}$", table, re.MULTILINE)
        assert table.count(f"  {arm}: ") == 3
    assert "$ stepjepa compare" in said
    assert (tmp_path / "a" / "report.html").exists()


def test_the_table_is_pasted_between_its_marks(load: Load, tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("x\n<!-- a -->\nold\n<!-- end -->\ny <!-- end -->\n", encoding="utf-8")
    load("quickstart").paste(document, "a", "new")
    expected = "x\n<!-- a -->\n```text\nnew\n```\n<!-- end -->\ny <!-- end -->\n"
    assert document.read_text(encoding="utf-8") == expected


def test_quickstart_sizes(load: Load) -> None:
    quickstart = load("quickstart")
    assert quickstart.size_of("", full=True, tiny=False) == quickstart.FULL
    assert quickstart.size_of("some/model", full=False, tiny=False).model.startswith("--model_name some/model --lora ")


@pytest.mark.slow
def test_llm_jepa_with_lora(load: Load, summaries: Summaries, tmp_path: Path) -> None:
    load("llm_jepa_lora").run(tmp_path / "a", tiny=True)
    assert set(summaries(tmp_path / "a")) == {"base", "adapter-regular", "adapter-llm-jepa"}
    for name, mode in (("adapter-regular", "regular"), ("adapter-llm-jepa", "llm-jepa")):
        folder = tmp_path / "a" / name
        adapter = json.loads((folder / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"].endswith("base")
        assert config_of(folder)["mode"] == mode
    assert (tmp_path / "a" / "merged" / "model.safetensors").exists()
    data = tmp_path / "a" / "data"
    trained, tested = (
        {record.messages[-2]["content"] for name in names for record in read_records(data / f"{name}.jsonl")}
        for names in (("base", "further"), ("nl-rx-test",))
    )
    assert len(trained) > 20
    assert len(tested) == 3


@pytest.mark.slow
def test_pretrain_then_finetune(load: Load, summaries: Summaries, tmp_path: Path) -> None:
    load("pretrain_finetune").run(tmp_path / "a", tiny=True)
    assert set(summaries(tmp_path / "a")) == {"after-none", "after-regular", "after-llm-jepa"}


def test_own_views(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("own_views")
    example.run(tmp_path / "a", tiny=True)
    record = read_records(tmp_path / "a" / "data" / "train.jsonl")[0]
    views = example.with_views(record)
    assert views["text"] in record.messages[-2]["content"]
    assert record.answer.endswith(views["code"])
    assert "\\boxed{" in views["code"]
    table = capsys.readouterr().out.partition("held-out records")[2].splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["lbd", "0.0"], ["lbd", "0.1"]]


def test_own_splitter(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("own_splitter").run(tmp_path / "a", tiny=True)
    captured = capsys.readouterr()
    assert "fewer than two steps: 8" in captured.err
    assert re.search(r"^kept +8$", captured.out, re.MULTILINE)
    record = read_records(tmp_path / "a" / "train.jsonl")[0]
    assert [step.split()[0] for step in record.answer.split("\n\n")] == ["First,", "Next,", "Finally,"]
    assert config_of(tmp_path / "a" / "step-jepa")["mode"] == "step-jepa"


def test_own_splitter_by_hand(load: Load) -> None:
    split = load("sentence_steps").split
    assert split("First, 2. Next, 3! Finally, 4.") == ["First, 2.", "Next, 3!", "Finally, 4."]
    # Not where the word stands within a sentence, or begins no sentence.
    assert split("He asks who is Next, then goes.") == ["He asks who is Next, then goes."]


@pytest.mark.slow
def test_sweep_and_compare(
    load: Load, summaries: Summaries, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load("sweep_and_compare").run(tmp_path / "a", tiny=True)
    folders = sorted(str(path.parent.relative_to(tmp_path / "a")) for path in tmp_path.rglob("*.summary.json"))
    assert folders == [f"sweep/{arm}/seed{seed}" for arm in ("regular", "step-jepa") for seed in (23, 82)]
    assert (tmp_path / "a" / "comparison.png").stat().st_size > 0
    assert "</html>" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")[-100:]
    assert "Mean ± standard deviation over seeds" in capsys.readouterr().out


def test_a_command_that_ends_otherwise_ends_the_example(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    command = load("shown").command
    with pytest.raises(SystemExit) as ended:
        command("report nowhere")
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        command("--version", expected=2)
    assert ended.value.code == 1
    command("report nowhere", expected=2)


def test_a_command_is_run_as_a_shell_would(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import shown

    shown.command("--version", path=tmp_path)
    first, second = capfd.readouterr().out.strip().splitlines()
    assert first == f"$ PYTHONPATH={tmp_path} stepjepa --version"
    assert second.startswith("stepjepa ")


def test_nothing_is_overwritten(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder = load("shown").new_folder
    with pytest.raises(SystemExit, match="is there already; name another --output_dir"):
        new_folder("a", tmp_path)
    assert new_folder("a", tmp_path / "b") == tmp_path / "b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a-1").mkdir(parents=True)
    assert new_folder("a") == Path("runs/a-2")


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \[(\S+?)\]", table, re.MULTILINE))
    assert named == {*SCRIPTS, *(path.name for path in EXAMPLES.glob("*.ipynb"))}
