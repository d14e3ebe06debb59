"""What the benchmark makes of its results: targets, the page, pictures."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from stepjepa.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
arms = importlib.import_module("bench_arms")
plots = importlib.import_module("bench_plots")
report = importlib.import_module("report")
table = importlib.import_module("bench_table")
targets = importlib.import_module("bench_targets")

PNG = b"\x89PNG"


def made_up_suite():
    # name -> examples/s, peak MiB, ratio of tokens
    figures = {
        "trl padded 16": (40.0, 200.0, None),
        "trl packed 512": (50.0, 170.0, None),
        "published three rows, padded to 512": (2.0, 900.0, None),
        "regular": (60.0, 150.0, 1.0),
        "regular 4x4": (66.0, 140.0, 1.0),
        "llm-jepa branched, forest": (49.0, 180.0, 1.25),
        "llm-jepa branched, LD 0.75": (55.0, 180.0, 1.25),
        "step-jepa all, forest": (45.0, 160.0, 1.3),
        "step-jepa all, rows": (30.0, 190.0, 1.3),
    }
    made = []
    for name in figures:
        views = {"mode": "llm-jepa" if "llm" in name else "step-jepa" if "step" in name else "regular"}
        views |= {"jepa_ratio": 0.25} if "LD" in name else {}
        ours = None if name.startswith(("trl", "published")) else views
        made.append(arms.Arm(name, ours, published="three rows" if name.startswith("published") else None))
    one = {
        name: {"examples_per_second": speed, "peak_mib": peak, "baseline_mib": 100.0, "tokens": 30, "examples": 3}
        | ({} if ratio is None else {"token_ratio": ratio})
        for name, (speed, peak, ratio) in figures.items()
    }
    summary = table.as_json(table.summarise([one], made))
    information = {
        "file": "synth_train.jsonl",
        "tokens_per_example": 46.2,
        "model": "preset:tiny",
        "parameters": 844928,
    }
    suite = {"data": information | {"vocabulary": 0}, "arms": [arm.to_dict() for arm in made], "rounds": [one]}
    return suite | {"summary": summary}


def test_targets_are_the_ratios_they_say():
    found = {target.what: target for target in targets.find_targets(made_up_suite(), "synth", 16)}
    expected = {
        "regular over TRL's best": (60 / 50, False),
        "regular's best setting over TRL's best": (66 / 50, None),
        "llm-jepa branched, forest over TRL's best": (49 / 50, False),
        "regular: peak memory over that of trl padded 16": (150 / 200, True),
        "regular: peak memory over that of trl padded 16, without what is there before training": (50 / 100, None),
        "llm-jepa branched, forest: time over regular / token ratio": (60 / 49 / 1.25, True),
        "llm-jepa branched, forest over published three rows, padded to 512": (49 / 2, False),
        "step-jepa all: forest over rows": (45 / 30, True),
        "llm-jepa branched, LD 0.75: time over regular / (1 + 0.27 (token ratio - 1))": (60 / 55 / 1.0675, False),
    }
    for what, (value, reached) in expected.items():
        assert found[what].found.median == pytest.approx(value), what
        assert found[what].reached is reached, what
    # What was not measured is left out.
    assert not any("separate" in what or "trimmed" in what or "step-jepa first" in what for what in found)


def test_a_large_vocabulary_has_a_stricter_aim_for_memory():
    found = {target.what: target for target in targets.find_targets(made_up_suite(), "vocabulary", 16)}
    assert found["regular: peak memory over that of trl padded 16"].aim == 0.5


def test_the_page_is_what_the_results_give():
    page = report.PAGE.read_text(encoding="utf-8")
    file = re.search(report.BEGIN.replace("{file}", r"(\S+)"), page)[1]
    results = report.read_results(ROOT / "benchmarks" / "results" / file)
    assert report.generated(results, file) in page
    assert all(report.picture(suite).read_bytes().startswith(PNG) for suite in results["suites"])


def test_only_what_stands_between_the_markers_is_replaced():
    begin = report.BEGIN.format(file="old.json")
    assert report.replace_between(f"before\n{begin}\nold\n{report.END}\nbehind\n", "new") == "before\nnew\nbehind\n"
    for page in ("nothing", f"{report.END} {begin}", begin):
        with pytest.raises(UserError, match="has no two markers"):
            report.replace_between(page, "new")


def test_a_report_from_file_to_page(tmp_path, monkeypatch, capsys):
    settings = {"threads": 2, "batch_size": 16, "rounds": 1}
    versions = {"torch": "2", "transformers": "5", "trl": "1"}
    head = {"date": "2030-01-31", "settings": settings, "versions": versions}
    file = tmp_path / "made.json"
    file.write_text(json.dumps({**head, "suites": {"synth": made_up_suite()}}), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"{report.BEGIN.format(file='-')}\n{report.END}\n", encoding="utf-8")
    for name, value in (("PAGE", page), ("PLOTS", tmp_path / "plots")):
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(sys, "argv", ["report.py", str(file)])
    assert report.main() == 0
    text = page.read_text(encoding="utf-8")
    assert "| synth | step-jepa all: forest over rows | ≥ 1.4 | 1.50 [1.50, 1.50] | yes |" in text
    assert (tmp_path / "plots" / "bench-synth.png").read_bytes().startswith(PNG)
    monkeypatch.setattr(sys, "argv", ["report.py", "--print", str(file)])
    capsys.readouterr()
    assert report.main() == 0
    assert capsys.readouterr().out.strip() == text.strip()


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not valid JSON"), ("{}", "neither of bench.py nor"), (None, "no such")]
)
def test_what_is_no_results_file_is_one_line(tmp_path, monkeypatch, capsys, text, said):
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report.py", str(file)])
    assert report.main() == 2
    assert said in capsys.readouterr().err


def test_curves_are_drawn_with_gaps(tmp_path):
    point = {"seconds_per_record": 0.01, "peak_mib": 300.0}
    curve = {"sizes": [2, 4], "points": {"regular": [point, point], "step-jepa all": [point, None]}}
    plots.draw_curves({"curves": {"steps of a record": curve}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
