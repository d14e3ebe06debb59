"""The sections of a page: their numbers, computed by hand for made-up runs."""

import json
import re

import pytest

from made_up_logs import STEP_JEPA, log
from made_up_runs import change, evaluate, make_run
from stepjepa.errors import UserError
from stepjepa.pages.curves import POINTS, looks, loss_section, representation_section
from stepjepa.pages.overview import differing, facts, overview_section
from stepjepa.pages.render import chart, chart_text, duration, interval, json_block, magnitude, number, plain
from stepjepa.pages.results import (
    accuracy_section,
    compare_runs,
    comparison_section,
    error_counts,
    error_section,
    score_table,
)
from stepjepa.pages.runs import read_runs
from stepjepa.terminal import PALETTE


def charts(html: str) -> dict[str, dict]:
    """The charts of some markup, by their names."""
    found = re.findall(r'<div class="chart" id="([^"]+)".*?<script type="application/json"[^>]*>(.*?)</script>', html)
    return {name: json.loads(data) for name, data in found}


@pytest.mark.parametrize(
    ("shown", "value"),
    [
        (plain(None), "–"),
        (plain(True), "yes"),
        (plain({"a": [1]}), '{"a": [1]}'),
        (number(1234567), "1,234,567"),
        (number(float("nan")), "–"),
        (interval({"mean": 0.5, "low": 0.25, "high": 0.75}), "50.0% [25.0, 75.0]"),
        (interval({"mean": 0.5, "low": None, "high": None}), "50.0%"),
        (duration(-1), "–"),
        (duration(3 * 3600 + 20 * 60), "3 h 20 min"),
        (magnitude(2924312088576.0), "2.92 T"),
    ],
)
def test_formatted_values(shown, value):
    assert shown == value


def test_data_and_labels_are_not_markup():
    value = {"a": "</script><script>alert(1)</script>", "b": "\u2028&", "c": [float("nan"), float("inf"), 1.5]}
    block = json_block("name", value)
    assert block.count("<") == 2 and block.count(">") == 2 and "\u2028" not in block
    assert json.loads(block.partition(">")[2].rpartition("<")[0]) == {**value, "c": [None, None, 1.5]}
    assert chart_text("<b>5 & 7</b>") == "&lt;b&gt;5 &amp; 7&lt;/b&gt;"
    assert '"><script>' not in chart("a", '"><script>', [], height=7)


def test_the_facts_and_scores_of_a_run(tmp_path):
    parts = {
        "counts": {"records": 1009, "pairs": 997, "without a pair": 12, "over length": 0},
        "encoding": {"used": "tree", "because": "all layers are attention"},
        "parameters": {"trained": 11, "total": 1013},
        "command": ["train", "--train_file=a b.jsonl"],
    }
    jepa = {**STEP_JEPA, "sigreg": 0.05, "target_grad": "stop", "jepa_ratio": 0.75}
    folder = make_run(tmp_path / "a", "1101", jepa=jepa, flops=2.5e12, **parts)
    change(folder / "run.json", "tokens", to={"all": 130, "main": 100, "ratio": 1.3})
    (run,) = read_runs([folder])
    expected = {
        "Parameters trained": "11 of 1,013",
        "Mode": "step-jepa, K = 2 predictors, layout branched",
        "Encoding": "tree: all layers are attention",
        "Objective": "1 × LM loss + 0.5 × cosine + 0.05 × sigreg, target gradient stop, loss dropout 0.25",
        "Data": "train: train.jsonl (9 records, sha256 dddddddddddd)",
        "Records and pairs": "1,009 records, 997 pairs, 12 without a pair",
        "Cost over regular": "× 1.30 tokens",
        "FLOPs of training": "2.5 T",
        "Time of training": "2.5 s",
    }
    assert expected.items() <= facts(run).items()
    assert "stepjepa train &#39;--train_file=a b.jsonl&#39;" in overview_section([run]).html


def test_only_settings_that_differ_are_put_side_by_side(arms):
    regular, step = read_runs([arms[0], arms[3]])
    columns, rows = differing([regular, step])
    # A regular run has no use for the settings of views.
    assert [row[columns.index("lbd")] for row in rows] == ["–", "0.5"] and "mode" in columns
    assert not {"front_pred", "output_dir", "learning_rate"} & set(columns)
    assert differing([regular, regular])[0] == ["run"]


def test_a_run_without_any_facts_still_has_an_overview(tmp_path):
    (tmp_path / "a").mkdir()
    text = '{"jepa": {"mode": 7}, "counts": 3, "lora": [7], "versions": {"x": [1]}}'
    (tmp_path / "a" / "run.json").write_text(text, encoding="utf-8")
    runs = read_runs([tmp_path / "a"])
    assert facts(runs[0])["Records and pairs"] == "–"
    assert overview_section(runs).title == "What was trained"
    look = looks(runs, [])
    empty = [accuracy_section(runs), error_section(runs), loss_section(runs, look), representation_section(runs, look)]
    assert [*empty, comparison_section(compare_runs(runs))] == [None] * 5


def test_losses_over_steps_of_one_run(tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa=STEP_JEPA)
    log(folder, 3, views=True, eval_lm_loss=5.0, eval_answer_exact=0.25)
    runs = read_runs([folder])
    section = loss_section(runs, looks(runs, []))
    found = charts(section.html)
    total, lm, held_out = found["losses-0"]["data"]
    assert total["x"] == [7, 14, 21] and total["y"] == [13, 6.5, 4.33333]
    assert (lm["name"], held_out["name"], held_out["line"]["dash"]) == ("LM loss", "LM loss, held-out", "dot")
    assert [each["name"] for each in found["losses-1"]["data"]] == ["Alignment loss"]
    assert "Answers during training: exact" in section.html


def test_of_several_runs_each_column_has_a_chart(arms):
    runs = read_runs(arms)
    look = looks(runs, compare_runs(runs))
    traces = charts(loss_section(runs, look).html)["losses-0"]["data"]
    assert [trace["meta"]["run"] for trace in traces] == [run.name for run in runs]
    # Arms have colours, seeds have line styles.
    assert [trace["line"]["color"] for trace in traces] == [PALETTE[0]] * 3 + [PALETTE[1]] * 3
    assert [trace["line"]["dash"] for trace in traces] == ["solid", "dash", "dot"] * 2
    assert all(len(each["data"]) == 3 for each in charts(representation_section(runs, look).html).values())


def test_long_logs_are_thinned_and_values_that_are_no_numbers_skipped(tmp_path):
    folder = make_run(tmp_path / "a", "1")
    log(folder, 2 * POINTS + 3)
    lines = [{"step": 20_011, "loss": float("nan")}, {"step": 20_021, "loss": "x"}, {"step": 20_023, "loss": 1.0}]
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n".join(map(json.dumps, lines)))
    runs = read_runs([folder])
    trace = charts(loss_section(runs, looks(runs, [])).html)["losses-0"]["data"][0]
    assert len(trace["x"]) <= POINTS + 1 and not {20_011, 20_021} & set(trace["x"])
    assert (trace["x"][-1], trace["y"][-1]) == (20_023, 1.0)


@pytest.mark.parametrize(("shuffled", "warned"), [(0.995, True), (0.5, False)])
def test_a_collapse_is_reported(shuffled, warned, tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa=STEP_JEPA)
    log(folder, views=True, shuffled_similarity=shuffled)
    runs = read_runs([folder])
    html = representation_section(runs, looks(runs, [])).html
    assert ("step 35: unrelated pairs have cosine 0.995" in html) is warned


def test_scores_and_errors(tmp_path):
    first = make_run(tmp_path / "a", "1100", lenient="1110", stopped="1101")
    runs = read_runs([first, make_run(tmp_path / "b", "1000", seed=3)])
    evaluated = [(run, run.evaluations["test"]) for run in runs]
    columns, rows = score_table(evaluated)
    assert columns[:4] == ["run", "exact", "prefix", "stopped by itself"]
    assert rows[0][1:5] == ["50.0% [15.0, 85.0]", "75.0% [30.1, 95.4]", "75.0% [30.1, 95.4]", "25.0%"]
    assert rows[0][-2:] == ["0.750", "0.250"]
    assert error_counts(evaluated) == (["right", "wrong answer"], [[2, 2], [1, 3]])
    html = error_section(runs).html
    assert "3 (75.0%)" in html
    assert [bar["x"] for bar in charts(html)["errors-0"]["data"]] == [[50, 25], [50, 75]]
    dots = charts(accuracy_section(runs).html)["accuracy-0"]["data"]
    assert dots[0]["x"] == [50, 25] and dots[0]["error_x"]["array"][0] == pytest.approx(35.0, abs=0.05)


def test_arms_are_compared_over_seeds(arms):
    section = comparison_section(compare_runs(read_runs(arms)))
    found = charts(section.html)
    means, seeds = found["arms-0"]["data"]
    # Of four examples right: 1, 2, 1 and 2, 2, 3.
    assert means["x"] == pytest.approx([100 / 3, 175 / 3])
    assert seeds["x"] == [25, 50, 25, 50, 50, 75]
    assert means["error_x"]["array"] == pytest.approx([14.43, 14.43], abs=0.01)
    (difference,) = found["difference-0"]["data"]
    # Differences of 25, 0 and 50 points: mean 25, standard error 14.43, t of 2 degrees of freedom 4.303.
    assert difference["x"] == [25]
    assert difference["error_x"]["array"][0] == pytest.approx(62.10, abs=0.01)
    assert section.html.index("no arm is shown to be better than regular") < section.html.index("<table")
    assert "At equal steps" in section.html and "+25.00 [-37.10, +87.10]" in section.html


def test_runs_that_cannot_be_compared_say_why(arms):
    section = comparison_section(compare_runs(read_runs(arms[:3])))
    assert "the runs differ in nothing but their seeds" in section.html
    with pytest.raises(UserError, match="--baseline: no arm"):
        compare_runs(read_runs(arms), baseline="other")


def test_a_sweep_names_its_arms(tmp_path, arms):
    trials = [
        {"name": f"{arm}/seed{seed}", "arm": arm, "label": f"{arm} of mine"}
        for arm in ("step", "regular")
        for seed in (2, 3)
    ]
    sweep = {"grid": {"baseline": "step"}, "trials": trials}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    (compared,) = compare_runs(read_runs([tmp_path]))
    assert [arm.name for arm in compared.comparison.arms] == ["step of mine", "regular of mine"]


def test_each_evaluation_is_compared_by_itself(arms):
    for folder in arms[::3]:
        evaluate(folder, "1111", name="dev")
    change(arms[0] / "dev.summary.json", "task", to="other")
    compared = compare_runs(read_runs(arms))
    assert [(each.evaluation, each.comparison is None) for each in compared] == [("dev", True), ("test", False)]
    assert "can't be compared" in compared[0].reason
