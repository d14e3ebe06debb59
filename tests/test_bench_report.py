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
gpu_table = importlib.import_module("bench_gpu_table")
plots = importlib.import_module("bench_plots")
report = importlib.import_module("report")
scaling_table = importlib.import_module("bench_scaling_table")
table = importlib.import_module("bench_table")
targets = importlib.import_module("bench_targets")

PNG = b"\x89PNG"


def made_up_suite():
    # name -> examples/s, peak MiB, ratio of tokens
    figures = {
        "trl padded 16": (40.0, 200.0, None),
        "trl packed 512": (50.0, 170.0, None),
        "trl grouped 16": (52.0, 210.0, None),
        "published three rows, padded to 512": (2.0, 900.0, None),
        "regular": (60.0, 150.0, 1.0),
        "regular 4x4": (66.0, 140.0, 1.0),
        "regular grouped": (65.0, 140.0, 1.0),
        "llm-jepa branched, forest": (49.0, 180.0, 1.25),
        "llm-jepa branched, grouped": (58.5, 180.0, 1.25),
        "llm-jepa branched, LD 0.75": (55.0, 180.0, 1.25),
        "step-jepa all, forest": (45.0, 160.0, 1.3),
        "step-jepa all, rows": (30.0, 190.0, 1.3),
    }
    made = []
    for name in figures:
        views = {"mode": "llm-jepa" if "llm" in name else "step-jepa" if "step" in name else "regular"}
        views |= {"jepa_ratio": 0.25} if "LD" in name else {}
        ours = None if name.startswith(("trl", "published")) else views
        published = "three rows" if name.startswith("published") else None
        sampling = arms.GROUPED if "grouped" in name else "random"
        made.append(arms.Arm(name, ours, published=published, sampling=sampling))
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
        "regular over TRL's regular, best settings": (66 / 52, True),
        "regular over TRL's regular, steps drawn at random": (60 / 50, False),
        "llm-jepa branched over TRL's regular, best settings": (58.5 / 52, True),
        "llm-jepa branched over TRL's regular, steps drawn at random": (49 / 50, False),
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
    # Like is compared with like.
    assert made_up_suite()["summary"]["llm-jepa branched, grouped"]["time_over_tokens"]["median"] == pytest.approx(
        65 / 58.5 / 1.25
    )
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
    monkeypatch.setattr(sys, "argv", ["report.py", "--page", str(page), str(file)])
    assert report.main() == 0
    text = page.read_text(encoding="utf-8")
    assert "| synth | step-jepa all: forest over rows | ≥ 1.4 | 1.50 [1.50, 1.50] | yes |" in text
    assert (tmp_path / "plots" / "bench-synth.png").read_bytes().startswith(PNG)
    monkeypatch.setattr(sys, "argv", ["report.py", "--print", str(file)])
    capsys.readouterr()
    assert report.main() == 0
    assert capsys.readouterr().out.strip() == text.strip()


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not valid JSON"), ("{}", "not of bench.py, scaling.py"), (None, "no such")]
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


HEAD = {"date": "2030-01-31", "machine": "cpu-2", "versions": {"torch": "2", "transformers": "5"}}


def made_up_scaling():
    settings = {"preset": "preset:tiny", "length": 256, "batch_size": 4}
    point = {"seconds_per_record": 0.01, "peak_mib": 300.0}
    steps = {"sizes": [2, 4], "parallel": False, "points": {"regular": [point, point], "step-jepa all": [point, None]}}
    two = {"seconds_per_record": 0.0061, "peak_mib": 310.0, "trained_bytes": 3072}
    two["communication"] = {"counts, all_reduce": {"calls": 1, "bytes": 24}}
    two["communication"]["gradients, all_reduce"] = {"calls": 2, "bytes": 3072}
    strong = {"sizes": [1, 2], "parallel": True, "points": {"regular, ddp": [point, two]}}
    return {**HEAD, "settings": settings, "curves": {"steps of a record": steps, "processes, strong scaling": strong}}


def made_up_gpu():
    names = {"model": "llama-3.2-1b", "training": "full", "checkpointing": "on"}
    # arm -> length -> (main tokens/s, tokens/s, MFU)
    figures = {
        "regular, sdpa causal": {512: (900.0, 900.0, 0.41), 4096: (1000.0, 1000.0, 0.53)},
        "published two rows, dense mask": {4096: (100.0, 200.0, 0.2)},
        "llm-jepa branched, forest, flex block mask": {512: (560.0, 840.0, 0.4), 4096: (650.0, 975.0, 0.4)},
    }
    points = []
    for arm, by_length in figures.items():
        for length, (main, every, mfu) in by_length.items():
            point = {"main_tokens_per_second": main, "tokens_per_second": every, "mfu": mfu, "peak_mib": 789.0}
            points.append(names | {"length": length, "arm": arm, "forward_only": False} | point)
    points.append(names | {"length": 4096, "arm": "b", "none": "out of memory"})
    check = {"what": "llm-jepa, flex", "embeddings": 2e-6, "gradient": None, "allowed": [1e-3, 1e-3], "passed": True}
    ceiling = {"device": "made up", "flops_per_second": 2.5e12}
    return {**HEAD, "ceiling": ceiling, "checks": [check], "points": points}


def test_efficiency_and_what_is_sent():
    lines = scaling_table.markdown(made_up_scaling()).splitlines()
    assert "| step-jepa all | 1 | – |" in lines
    # 10 ms in one process, 6.1 in two: 10 / 12.2.
    assert "| regular, ddp | 1 | 0.61 | 0.82 |" in lines
    assert "| regular, ddp | 1: 0.02344 | 2: 3 | 3 |" in lines


def test_targets_of_a_gpu():
    found = gpu_table.find_targets(made_up_gpu()["points"])
    assert [(round(target.found, 4), target.aim, target.reached) for target in found] == [
        (6.5, 3.0, True),
        # The worst of 900 / 840 and 1000 / 975.
        (1.0714, 1.05, False),
        (0.53, 0.5, True),
    ]
    forward = [point | {"forward_only": True} for point in made_up_gpu()["points"] if "none" not in point]
    assert not gpu_table.find_targets(forward)
    assert "forward pass alone" in gpu_table.markdown({**made_up_gpu(), "points": forward})


def test_the_gpu_table_says_what_was_checked_and_why_a_point_is_missing():
    lines = gpu_table.markdown(made_up_gpu()).splitlines()
    assert lines[0] == "made up: 2.5 TFLOP/s in a bfloat16 product"
    assert "| llm-jepa, flex | 2.0e-06 | – | yes |" in lines
    assert "| llama-3.2-1b | full | on | 4096 | regular, sdpa causal | 1000 | 1000 | 53.0 % | 789 |" in lines
    assert lines[-1] == "| llama-3.2-1b | full | on | 4096 | b | out of memory | – | – | – |"


@pytest.mark.parametrize(("made", "plot"), [(made_up_scaling, "scaling.png"), (made_up_gpu, "gpu.png")])
def test_other_benchmarks_have_markers_of_their_own(tmp_path, monkeypatch, made, plot):
    """On a copy of the real page."""
    before = report.PAGE.read_text(encoding="utf-8")
    page, file = tmp_path / "page.md", tmp_path / "made.json"
    page.write_text(before, encoding="utf-8")
    file.write_text(json.dumps(made()), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report.py", "--page", str(page), str(file)])
    assert report.main() == 0
    begin, end = report.markers(made())
    text = page.read_text(encoding="utf-8")
    assert report.text_of(made(), "made.json") in text
    assert begin.format(file="made.json") in text
    assert report.replace_between(before, "", begin, end) == report.replace_between(text, "", begin, end)
    assert (tmp_path / "plots" / plot).read_bytes().startswith(PNG)
