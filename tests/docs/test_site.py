"""What the site is made of: pages of the reference, formulas, links; pictures that are those of today's code."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from stepjepa.cli.commands import COMMANDS
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = {page for section in config["nav"] for pages in section.values() for page in pages}
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {"index.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
    made |= {f"reference/{name}.md" for name in ("cli", "config", "api")}
    assert named == there | made


def test_roles_of_docstrings_are_not_shown() -> None:
    html = "see :class:<code>Jepa</code>, :func:<code>~stepjepa.run</code>; 12:<code>x</code>"
    shown = "see <code>Jepa</code>, <code>stepjepa.run</code>; 12:<code>x</code>"
    assert load("hooks").on_page_content(html) == shown


def test_the_reference_has_every_command_every_flag_and_every_name() -> None:
    import stepjepa

    pages = load("reference").pages()
    for name in COMMANDS:
        assert f"## stepjepa {name}\n" in pages["cli.md"]
    for name in ("train_file", "predictors", "sigreg", "resume_from_checkpoint", "num_samples"):
        assert f"| `--{name}`" in pages["cli.md"]
    for name in set(stepjepa._HOME) - {"JepaConfig"}:
        assert re.search(rf"^::: stepjepa\.[\w.]+\.{name}$", pages["api.md"], re.MULTILINE), name
    assert "::: stepjepa.config.jepa.JepaConfig" in pages["config.md"]
    _, _, trainer = pages["api.md"].partition(
        "::: stepjepa.training.trainer.JepaTrainer\n    options:\n      inherited_members:"
    )
    listed = trainer.partition("\n")[0]
    assert all(name in listed for name in ("evaluate", "get_eval_dataloader", "create_model_card", "save_model"))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]+rel=\"?(?:stylesheet|preconnect)[^>]+(?:https?:)?//", text), page
    assert "<math" in (tmp_path / "site" / "mathematics.html").read_text(encoding="utf-8")


def test_formulas_are_mathml_and_unknown_commands_are_refused() -> None:
    pytest.importorskip("mkdocs")
    hooks = load("hooks")
    from markdown import Markdown

    made = Markdown(extensions=[hooks.Formulas()]).convert("With $`x_i`$:\n\n```math\n\\frac{a}{b} \\tag{7}\n```\n")
    assert made.count("<math") == 2
    assert "<msub>" in made and "<mfrac>" in made and '<span class="number">(7)</span>' in made
    with pytest.raises(ValueError, match="nonsense"):
        hooks.mathml(r"\nonsense{x}", "inline")


@pytest.mark.slow
def test_the_searches_that_readme_shows_find_a_sentence_of_its_test_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown belongs to the commands above it: the query is held out, the first hit is its own expression."""
    readme = load("readme")
    commands = readme.commands()
    (prepare,) = (words for words in commands if words[0] == "prepare")
    (search,) = (words for words in commands if words[0] == "search")
    monkeypatch.chdir(tmp_path)
    assert main(prepare) == 0
    corpus = search[search.index("--corpus") + 1]
    chats = [json.loads(line)["messages"] for line in Path(corpus).read_text(encoding="utf-8").splitlines()]
    answers = {question["content"]: answer["content"] for *_, question, answer in chats}
    query = search[search.index("--query") + 1]
    retrieval, mapped, title, *hits = readme.shown("output of search").splitlines()
    assert re.match(rf"nearest answer is right by embeddings: .* of {len(chats)} questions", retrieval)
    assert re.match(rf"the same behind a linear map, fitted on .*: .* of {len(chats)} questions", mapped)
    assert title == query
    assert len(hits) == int(search[search.index("--k") + 1])
    matches = [re.fullmatch(r" +(\d\.\d{3})  line (\d+) +(.+)", hit) for hit in hits]
    assert all(matches)
    scores, lines, texts = zip(*(hit.groups() for hit in matches if hit), strict=True)
    assert list(scores) == sorted(scores, reverse=True)
    assert texts[0] == answers[query]
    assert [chats[int(line) - 1][-1]["content"] for line in lines] == list(texts)


def test_the_figures_of_readme_are_those_of_the_pages() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What one gains")[2].partition("\n## ")[0]
    # Its table of retrieval is written by results.py, whose test compares it; another page repeats some of `synth`.
    table = text.partition("<!-- results -->")[2].partition("<!-- end -->")[0]
    row = re.search(r"^\| `synth`, \d seeds \|.*$", table, re.MULTILINE)
    assert row is not None
    figures = re.findall(r"\| (\d+\.\d)\b", row[0])
    page = (ROOT / "docs" / "how-to" / "which-loss.md").read_text(encoding="utf-8")
    repeated = re.findall(r"(\d+\.\d) %", page)
    assert len(repeated) == 3, repeated
    assert all(figure in figures for figure in repeated), [figure for figure in repeated if figure not in figures]
    # On two CPU cores: LLM-JEPA's layouts and plain training over TRL's best setting, lowest and highest of the suites.
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("<!-- tables.py -->")[2]
    medians = {
        arm: [float(each) for each in re.findall(r"\| ([\d.]+) \[", re.search(rf"^\| {arm} (.*)$", page, re.M)[0])]
        for arm in ("regular", "branched", "separate")
    }
    of_pairs, of_plain = medians["branched"] + medians["separate"], medians["regular"]
    shown = re.search(r"two CPU cores LLM-JEPA (\.\d+) to (\d\.\d+) times, plain training (\d\.\d+) to (\d\.\d+)", text)
    assert shown is not None
    ends = [min(of_pairs), max(of_pairs), min(of_plain), max(of_plain)]
    assert [float(each) for each in shown.groups()] == ends
    # On a GPU: examples a second over those of TRL, of LLM-JEPA's layouts and of plain training, in the default form.
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("<!-- tables.py, gpu -->")[2]
    rows = re.findall(r"^\| .+? \| (\w+), varlen \| [\d,]+ \| ([\d.]+) \|", page.partition("<!-- end -->")[0], re.M)
    ours = sorted(float(over) for arm, over in rows if arm in ("branched", "separate"))
    plain = sorted(float(over) for arm, over in rows if arm == "regular")
    shown = re.search(r"on an H100 LLM-JEPA (\.\d\d) to (\.\d\d) times, plain training (\.\d\d) and (\d\.\d\d)", text)
    assert shown is not None
    assert [float(each) for each in shown.groups()] == [ours[0], ours[-1], *plain]
    # Behind a long prompt: LLM-JEPA and plain training.
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    point = re.search(r"\| 2,000 tokens of a shared prefix \| ([\d.]+), ([\d.]+), ([\d.]+) \|", page)
    shown = re.search(r"prompt of 2,000 tokens \[([\d.]+) and ([\d.]+) times\]", text)
    assert shown is not None
    assert point is not None
    of_plain, *of_pairs = map(float, point.groups())
    assert [float(each) for each in shown.groups()] == [round(min(of_pairs), 1), round(of_plain, 1)]


def test_the_page_of_results_is_read_in_five_minutes() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert max(line.count("|") - 1 for line in tables) <= 7
    prose = [line for line in text.splitlines() if line and not line.startswith(("|", "!", "#"))]
    # At 300 words a minute, without figures, tables and pictures.
    words = [word for line in prose for word in re.sub(r"\]\(\S+\)", "]", line).split() if re.search("[a-z]", word)]
    assert len(words) < 5 * 300
    long = [line for line in prose if len(line.split()) > 75]
    assert not long, long


def test_the_picture_of_segments_has_the_figures_of_the_code(tmp_path: Path) -> None:
    picture = load("segments_picture")
    picture.draw(tmp_path / "again.svg")
    for file in (picture.FILE, tmp_path / "again.svg"):
        drawn = file.read_text(encoding="utf-8")
        assert all(title in drawn for title in picture.titles()), "run 'make pictures'"


def test_pictures_are_those_of_the_code() -> None:
    pictures = load("design_pictures")
    remaining = json.loads((pictures.FOLDER / "pictures.json").read_text(encoding="utf-8"))
    result = pictures.inspections()
    assert remaining["layouts"] == {name: pictures.fingerprint(each) for name, each in result.items()}, (
        "run 'make pictures'"
    )
    for name in (*result, "tree", "collapse"):
        assert (pictures.FOLDER / f"{name}.png").is_file()
    gaps = {name: each["matched"] - each["shuffled"] for name, each in remaining["collapse"].items()}
    assert gaps["cosine"] < 0.01 and gaps["infonce"] > 0.2
    assert all(isinstance(config, JepaConfig) for config in pictures.LAYOUTS.values())
