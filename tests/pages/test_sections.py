"""The parts of a page: what they say of made-up runs, worked out by hand."""

import json
import re

import pytest

from made_up_logs import STEP_JEPA, log
from made_up_runs import change, evaluate, make_run
from stepjepa.errors import UserError
from stepjepa.pages.arms import arms_section, compare_runs, looks
from stepjepa.pages.cells import duration, interval, magnitude, number, percent, plain
from stepjepa.pages.charts import PALETTE, chart, chart_text, dash
from stepjepa.pages.curves import LOSSES, POINTS, last_values, loss_section, representation_section
from stepjepa.pages.markup import json_block, json_text
from stepjepa.pages.material import read_runs
from stepjepa.pages.overview import differing, facts, figures, overview_section
from stepjepa.pages.scores import accuracy_section, error_counts, error_section, score_table


def charts(html: str) -> dict[str, dict]:
    """The charts of some markup, by their titles or names."""
    found = re.findall(r'<div class="chart" id="([^"]+)".*?<script type="application/json"[^>]*>(.*?)</script>', html)
    return {name: json.loads(data) for name, data in found}


@pytest.mark.parametrize(
    ("shown", "value"),
    [
        (plain(None), "–"),
        (plain(True), "yes"),
        (plain(2e-5), "2e-05"),
        (plain({"a": [1]}), '{"a": [1]}'),
        (number(1234567), "1,234,567"),
        (number(float("nan")), "–"),
        (number(True), "–"),
        (number("7"), "–"),
        (percent(0.125), "12.5%"),
        (interval({"mean": 0.5, "low": 0.25, "high": 0.75}), "50.0% [25.0, 75.0]"),
        (interval({"mean": 0.5, "low": None, "high": None}), "50.0%"),
        (interval(None), "–"),
        (duration(57.51), "58 s"),
        (duration(-1), "–"),
        (duration(3 * 3600 + 20 * 60), "3 h 20 min"),
        (duration(None), "–"),
        (magnitude(2924312088576.0), "2.92 T"),
        (magnitude(123456), "123,456"),
        (magnitude("x"), "–"),
    ],
)
def test_cells(shown, value):
    assert shown == value


def test_data_cannot_end_its_element():
    value = {"a": "</script><script>alert(1)</script>", "b": "\u2028&", "c": [float("nan"), float("inf"), 1.5]}
    block = json_block("name", value)
    assert block.count("<") == 2 and block.count(">") == 2
    inner = block.partition(">")[2].rpartition("<")[0]
    assert json.loads(inner) == {**value, "c": [None, None, 1.5]}
    assert "\u2028" not in json_text(value)


def test_texts_of_charts_are_not_markup():
    assert chart_text("<b>5 & 7</b>") == "&lt;b&gt;5 &amp; 7&lt;/b&gt;"
    html = chart("a", [], {}, label='"><script>', height=7)
    assert "<script>" not in html and 'style="height:7px"' in html
    assert len({dash(number) for number in range(6)}) == 6
    assert dash(6) == dash(0)


def test_the_facts_of_a_run(tmp_path):
    parts = {
        "counts": {"records": 1009, "pairs": 997, "without a pair": 12, "over length": 0},
        "encoding": {"used": "tree", "because": "all layers are attention"},
        "parameters": {"trained": 11, "total": 1013},
        "command": ["train", "--train_file=a b.jsonl"],
    }
    jepa = {**STEP_JEPA, "sigreg": 0.05, "target_grad": "stop", "jepa_ratio": 0.75}
    folder = make_run(tmp_path / "a", "1101", jepa=jepa, flops=2.5e12, **parts)
    change(folder / "run.json", "tokens", to={"all": 130, "main": 100, "ratio": 1.3})
    log(folder)
    (run,) = read_runs([folder])
    found = dict(facts(run))
    assert found["Parameters trained"] == "11 of 1,013"
    assert found["Mode"] == "step-jepa, K = 2 predictors"
    assert found["Layout"] == "branched"
    assert found["Encoding"] == "tree: all layers are attention"
    assert found["Objective"] == "1 × LM loss + 0.5 × cosine + 0.05 × sigreg, target gradient stop, loss dropout 0.25"
    assert found["Data"] == "train: train.jsonl (9 records, sha256 dddddddddddd)"
    assert found["Records and pairs"] == "1,009 records, 997 pairs, 12 without a pair"
    assert found["Cost over regular"] == "× 1.30 tokens"
    assert found["FLOPs of training"] == "2.5 T"
    assert found["Time of training"] == "2.5 s"
    html = overview_section([run]).html
    assert "stepjepa train &#39;--train_file=a b.jsonl&#39;" in html
    cards = {name: (value, more) for name, value, more in figures(run)}
    # Wilson's interval of 3 of 4.
    assert cards["exact"] == ("75.0%", "[30.1, 95.4] · test, 4 examples")
    assert cards["LM loss on right answers"] == ("0.500", "test")
    assert cards["tokens over regular"] == ("× 1.30", "")


def test_only_what_differs_is_put_side_by_side(arms):
    regular, step = read_runs([arms[0], arms[3]])
    columns, rows = differing([regular, step])
    assert columns[0] == "run" and "mode" in columns
    # A regular run has no use for what it says of views.
    assert dict(zip(columns, rows[0], strict=True))["lbd"] == "–"
    assert dict(zip(columns, rows[1], strict=True))["lbd"] == "0.5"
    assert "front_pred" not in columns and "output_dir" not in columns and "learning_rate" not in columns
    assert differing([regular, regular]) == (["run"], [])


def test_a_run_that_says_nothing_still_has_a_page(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(
        '{"jepa": {"mode": 7}, "counts": 3, "lora": [7], "versions": {"x": [1]}}', encoding="utf-8"
    )
    (run,) = read_runs([tmp_path / "a"])
    assert dict(facts(run))["Records and pairs"] == "–"
    assert "What was trained" in overview_section([run]).title
    assert accuracy_section([run]) is None and error_section([run]) is None
    assert loss_section([run], looks([run], [])) is None
    assert representation_section([run], looks([run], [])) is None
    assert arms_section(compare_runs([run])) is None


def test_losses_over_steps_of_one_run(tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa=STEP_JEPA)
    log(folder, 3, views=True, eval_lm_loss=5.0, eval_answer_exact=0.25)
    runs = read_runs([folder])
    section = loss_section(runs, looks(runs, []))
    assert section is not None
    found = charts(section.html)
    total, lm, held_out = found["loss-0"]["data"]
    assert total["x"] == [7, 14, 21] and total["y"] == [13, 6.5, 4.33333]
    assert (lm["name"], held_out["name"]) == ("LM loss", "LM loss, held-out")
    assert held_out["line"]["dash"] == "dot"
    assert [each["name"] for each in found["loss-1"]["data"]] == ["alignment loss"]
    assert "Answers during training: exact" in section.html
    columns, rows = last_values(runs, LOSSES)
    assert dict(zip(columns, rows[0], strict=True)) == {
        "run": "a",
        "Total loss": "4.333",
        "LM loss": "4",
        "LM loss, held-out": "5",
        "Alignment loss": "0.25",
    }


def test_of_several_runs_each_number_has_a_chart(arms):
    runs = read_runs(arms)
    look = looks(runs, compare_runs(runs))
    found = charts(loss_section(runs, look).html)
    assert [trace["meta"]["run"] for trace in found["loss-0"]["data"]] == [run.name for run in runs]
    # Arms have colours, seeds have lines.
    colours = [trace["line"]["color"] for trace in found["loss-0"]["data"]]
    assert colours == [PALETTE[0]] * 3 + [PALETTE[1]] * 3
    assert [trace["line"]["dash"] for trace in found["loss-0"]["data"]] == ["solid", "dash", "dot"] * 2
    section = representation_section(runs, look)
    assert "Cosine of pairs: shuffled pairs" in section.html
    assert all(len(each["data"]) == 3 for each in charts(section.html).values())


def test_long_logs_are_thinned_to_their_end(tmp_path):
    folder = make_run(tmp_path / "a", "1")
    log(folder, 2 * POINTS + 3)
    runs = read_runs([folder])
    trace = charts(loss_section(runs, looks(runs, [])).html)["loss-0"]["data"][0]
    assert len(trace["x"]) <= POINTS + 1
    assert trace["x"][-1] == 7 * (2 * POINTS + 3)


def test_numbers_that_are_none_leave_gaps_and_no_errors(tmp_path):
    folder = make_run(tmp_path / "a", "1")
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "loss": "x"},
        {"step": 4, "loss": 1.0},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    runs = read_runs([folder])
    trace = charts(loss_section(runs, looks(runs, [])).html)["loss-0"]["data"][0]
    assert (trace["x"], trace["y"]) == ([1, 4], [2, 1])


@pytest.mark.parametrize(("shuffled", "warned"), [(0.995, True), (0.5, False)])
def test_a_collapse_is_told(shuffled, warned, tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa=STEP_JEPA)
    log(folder, views=True, shuffled_similarity=shuffled)
    runs = read_runs([folder])
    section = representation_section(runs, looks(runs, []))
    assert ("step 35: unrelated pairs have cosine 0.995" in section.html) is warned


def test_scores_and_errors(tmp_path):
    first = make_run(tmp_path / "a", "1100", lenient="1110", stopped="1101")
    second = make_run(tmp_path / "b", "1000", seed=3)
    runs = read_runs([first, second])
    evaluated = [(run, run.evaluations["test"]) for run in runs]
    columns, rows = score_table(evaluated)
    assert columns[:4] == ["run", "exact", "prefix", "stopped by itself"]
    assert rows[0][1:5] == ["50.0% [15.0, 85.0]", "75.0% [30.1, 95.4]", "75.0% [30.1, 95.4]", "25.0%"]
    assert rows[0][-2:] == ["0.750", "0.250"]
    kinds, counts = error_counts(evaluated)
    assert kinds == ["right", "wrong answer"]
    assert counts == [[2, 2], [1, 3]]
    section = error_section(runs)
    assert "3 (75.0%)" in section.html
    bars = charts(section.html)["errors-0"]["data"]
    assert [bar["x"] for bar in bars] == [[50, 25], [50, 75]]
    dots = charts(accuracy_section(runs).html)["accuracy-0"]["data"]
    assert dots[0]["x"] == [50, 25]
    assert dots[0]["error_x"]["array"][0] == pytest.approx(35.0, abs=0.05)


def test_arms_are_compared_over_seeds(arms):
    runs = read_runs(arms)
    (compared,) = compare_runs(runs)
    section = arms_section([compared])
    found = charts(section.html)
    means, seeds = found["arms-0-headline"]["data"]
    # Of four examples right: 1, 2, 1 and 2, 2, 3.
    assert means["x"] == pytest.approx([100 / 3, 175 / 3])
    assert seeds["x"] == [25, 50, 25, 50, 50, 75]
    assert means["error_x"]["array"] == pytest.approx([14.43, 14.43], abs=0.01)
    (difference,) = found["difference-0"]["data"]
    # Differences of 25, 0 and 50 points: mean 25, standard error 14.43, t of 2 degrees of freedom 4.303.
    assert difference["x"] == [25]
    assert difference["error_x"]["array"][0] == pytest.approx(62.10, abs=0.01)
    assert "At equal steps" in section.html and "+25.00 [-37.10, +87.10]" in section.html


def test_runs_that_cannot_be_compared_say_why(arms):
    runs = read_runs(arms[:3])
    section = arms_section(compare_runs(runs))
    assert "the runs differ in nothing but their seeds" in section.html
    with pytest.raises(UserError, match="--baseline: no arm"):
        compare_runs(read_runs(arms), baseline="other")


def test_the_names_of_a_sweep_are_those_of_its_arms(tmp_path, arms):
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
