"""The sections of a page: their numbers, computed by hand for made-up runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from made_up_runs import STEP_JEPA, change, evaluate, log, make_run, retrieve
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.base.terminal import PALETTE
from stepjepa.study.page.answers import answers_section, shown_text
from stepjepa.study.page.charts import DASHES, POINTS, looks, run_legend
from stepjepa.study.page.logged_run import read_runs
from stepjepa.study.page.markup import json_block, with_code
from stepjepa.study.page.page import compare_runs
from stepjepa.study.page.sections import (
    accuracy_section,
    comparison_section,
    embedding_section,
    overview_section,
    steps_section,
)
from stepjepa.study.plot import draw


def charts(html: str) -> dict[str, dict]:
    """The charts of some markup, by their names."""
    result = re.findall(r'<div class="chart" id="([^"]+)".*?<script type="application/json"[^>]*>(.*?)</script>', html)
    return {name: json.loads(data) for name, data in result}


def rows(html: str) -> list[list[str]]:
    """The cells of all tables."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def say(folder: Path, **fields: Any) -> Path:
    """Give the lines of a run's evaluation these fields: a value for each line, or one for all."""
    file = folder / "test.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for place, line in enumerate(lines):
        line |= {name: value[place] if isinstance(value, list) else value for name, value in fields.items()}
    write_jsonl(file, lines)
    return folder


def test_data_for_scripts_ends_no_element():
    block = json_block("x", {"text": "</script><!-- &\u2028", "bad": float("nan")})
    inner = re.fullmatch(r'<script type="application/json" id="x">(.*)</script>', block, re.DOTALL)[1]
    assert not set("<>&\u2028") & set(inner)
    assert json.loads(inner) == {"text": "</script><!-- &\u2028", "bad": None}


def test_the_overview_says_what_was_trained(tmp_path):
    parts = {"command": ["train", "--train_file=a b.jsonl"], "parameters": {"trained": 11, "total": 1013}}
    folders = [make_run(tmp_path / "a", "1101", jepa=STEP_JEPA, flops=2.5e12, **parts), make_run(tmp_path / "b", "1")]
    html = overview_section(read_runs(folders)).html
    result = rows(html)
    facts = dict(zip(result[0], result[1], strict=True))
    assert [facts[name] for name in ("mode", "K", "layout")] == ["step-jepa", "2", "branched"]
    assert [facts[name] for name in ("FLOPs", "tokens", "seconds")] == ["2.5e+12", "1,000", "2.5"]
    assert "stepjepa train &#39;--train_file=a b.jsonl&#39;" in html


def test_settings_of_views_are_not_shown_of_a_run_without_any(tmp_path):
    table = overview_section(read_runs([make_run(tmp_path / "a", "1")])).parts[0].tables[0]
    assert "mode" in table.columns and not {"K", "layout"} & {*table.columns}


def test_a_run_without_any_facts_still_has_an_overview(tmp_path):
    (tmp_path / "a").mkdir()
    text = '{"jepa": {"mode": 7}, "counts": 3, "lora": [7], "versions": {"x": [1]}}'
    (tmp_path / "a" / "run.json").write_text(text, encoding="utf-8")
    runs = read_runs([tmp_path / "a"])
    assert overview_section(runs).title == "What was trained"
    look = looks(runs, None)
    empty = [accuracy_section(runs), steps_section(runs, look)]
    empty += [answers_section(runs), embedding_section(runs), comparison_section([])]
    assert not any(section.parts for section in empty)


def test_losses_over_steps_of_one_run(tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa=STEP_JEPA)
    log(folder, 3, views=True, eval_lm_loss=5.0, eval_answer_exact=0.25, grad_norm=1.0)
    runs = read_runs([folder])
    section = steps_section(runs, looks(runs, None))
    result = charts(section.html)
    (total,) = result["steps-0"]["lines"]
    assert total["x"] == [7, 14, 21] and total["y"] == [13, 6.5, 4.33333]
    lm, held_out = result["steps-1"]["lines"]
    assert (lm["name"], held_out["name"], held_out["dash"]) == ("a", "a, held-out", DASHES["dot"])
    assert (lm["heldOut"], held_out["heldOut"]) == (False, True)
    titles = [
        "loss",
        "LM loss",
        "JEPA loss",
        "answers: exact match",
        "matched similarity",
        "shuffled similarity",
        "source rank",
    ]
    assert re.findall("<figcaption>(.*?) <", section.html) == [*titles, "grad norm"]
    assert [chart["percent"] for chart in result.values()] == [False] * 3 + [True] + [False] * 4
    assert [each["y"] for each in result["steps-7"]["lines"]] == [[1, 1, 1]]
    # Answers are those to held-out records; no line of training needs to be told from theirs.
    (answers,) = result["steps-3"]["lines"]
    assert (answers["name"], answers["heldOut"], answers["dash"]) == ("a, held-out", True, DASHES["solid"])
    # For readers who do not see the charts.
    labels = re.findall('aria-label="([^"]*) over steps. Last values: (.*?)"', section.html)
    assert labels[1] == ("LM loss", "a 4 at step 21; a, held-out 5 at step 21")
    assert labels[3] == ("answers: exact match", "a, held-out 25.0% at step 21")


def test_named_sets_of_held_out_records_are_lines_of_their_metrics(tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa=STEP_JEPA)
    held_out = {"eval_lm_loss": 5.0, "eval_easy_lm_loss": 3.0, "eval_hard_lm_loss": 7.0, "eval_hard_source_rank": 2.0}
    # Scores that no line of training has are drawn, too.
    log(folder, 3, views=True, **held_out, eval_hard_loss=11.0, eval_easy_runtime=13.0, eval_retrieval_hits_at_1=0.5)
    runs = read_runs([folder])
    html = steps_section(runs, looks(runs, None)).html
    titles = re.findall("<figcaption>(.*?) <", html)
    assert titles.count("LM loss") == titles.count("loss") == titles.count("source rank") == 1
    assert not [title for title in titles if "easy" in title or "hard" in title]
    drawn = dict(zip(titles, charts(html).values(), strict=True))
    lines = {line["name"]: (line["dash"], line["y"][0]) for line in drawn["LM loss"]["lines"][1:]}
    assert lines == {
        "a, held-out": (DASHES["dot"], 5),
        "a, held-out easy": (DASHES["dashdot"], 3),
        "a, held-out hard": (DASHES["longdash"], 7),
    }
    assert [line["name"] for line in drawn["loss"]["lines"]] == ["a", "a, held-out hard"]
    assert [line["name"] for line in drawn["source rank"]["lines"]] == ["a", "a, held-out hard"]
    assert [line["name"] for line in drawn["retrieval hits at 1"]["lines"]] == ["a, held-out"]
    assert drawn["retrieval hits at 1"]["percent"]


def test_of_several_runs_each_column_has_a_chart(arms):
    runs = read_runs(arms)
    look = looks(runs, compare_runs(runs)[0][1])
    result = charts(steps_section(runs, look).html)
    lines = result["steps-0"]["lines"]
    assert [line["run"] for line in lines] == [run.name for run in runs]
    # Arms have colours, seeds have line styles.
    assert [line["colour"] for line in lines] == [PALETTE[0]] * 3 + [PALETTE[1]] * 3
    assert [line["dash"] for line in lines] == [DASHES[name] for name in ("solid", "dash", "dashdot")] * 2
    # Regular training has no views.
    assert [len(each["lines"]) for each in result.values()] == [6, 6, 3, 3, 3, 3]


def test_a_seed_has_one_line_style_in_all_arms_and_the_legend_names_the_arms(arms):
    runs = read_runs([*arms[:3], *arms[4:]])
    look = looks(runs, compare_runs(runs)[0][1])
    styles = {run.folder: look[run.name].dash for run in runs}
    assert styles[arms[4]] == styles[arms[1]] != styles[arms[0]]
    legend = run_legend(runs, look)
    assert [(arm, [name for name, _, _ in own]) for arm, own in legend] == [
        ("regular", ["regular/seed2", "regular/seed3", "regular/seed5"]),
        ("step-jepa", ["step/seed3", "step/seed5"]),
    ]


def test_runs_of_many_arms_look_different(tmp_path):
    jepa = [None, *({"mode": "llm-jepa", "predictors": k} for k in range(1, 12))]
    folders = [make_run(tmp_path / f"{k}-{s}", "1", seed=s, jepa=own) for k, own in enumerate(jepa) for s in (1, 2, 3)]
    runs = read_runs(folders)
    look = looks(runs, compare_runs(runs)[0][1])
    assert len({(style.colour, style.dash) for style in look.values()}) == len(runs) == 36


def test_long_logs_are_thinned_and_values_that_are_no_numbers_skipped(tmp_path):
    folder = make_run(tmp_path / "a", "1")
    log(folder, 2 * POINTS + 3)
    lines = [{"step": 20_011, "loss": float("nan")}, {"step": 20_021, "loss": "x"}, {"step": 20_023, "loss": 1.0}]
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n".join(map(json.dumps, lines)))
    runs = read_runs([folder])
    trace = charts(steps_section(runs, looks(runs, None)).html)["steps-0"]["lines"][0]
    assert len(trace["x"]) <= POINTS + 1 and not {20_011, 20_021} & set(trace["x"])
    assert (trace["x"][-1], trace["y"][-1]) == (20_023, 1.0)


@pytest.mark.parametrize(("shuffled", "warned"), [(0.995, True), (0.5, False)])
@pytest.mark.parametrize("loss", ["cosine", "infonce"])
def test_a_collapse_is_reported(shuffled, warned, loss, tmp_path):
    folder = make_run(tmp_path / "a", "1", jepa={**STEP_JEPA, "jepa_loss_type": loss})
    log(folder, views=True, shuffled_similarity=shuffled)
    runs = read_runs([folder])
    html = steps_section(runs, looks(runs, None)).html
    assert ("step 35: unrelated pairs have cosine 0.995" in html) is warned
    assert ("jepa_loss_type infonce" in html) is (warned and loss == "cosine")


@pytest.mark.parametrize(
    ("loss", "held_out", "logged", "said"),
    [("infonce", 8, True, True), ("infonce", 4, True, False), ("cosine", 8, True, False), ("infonce", 8, False, False)],
)
def test_losses_of_other_numbers_of_pairs_are_not_on_one_scale(loss, held_out, logged, said, tmp_path):
    training = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": held_out}
    folder = make_run(tmp_path / "a", "1", jepa={**STEP_JEPA, "jepa_loss_type": loss}, training=training)
    log(folder, views=True, **({"eval_jepa_loss": 0.5} if logged else {}))
    runs = read_runs([folder])
    assert ("not on one scale" in steps_section(runs, looks(runs, None)).html) is said


def test_runs_that_collapsed_share_a_warning(arms):
    for run in arms:
        log(run, views=True, shuffled_similarity=0.995)
    runs = read_runs(arms)
    (warning,) = steps_section(runs, looks(runs, None)).parts[0].warnings
    *lines, remedies = warning.split("\n")
    assert [line.partition(":")[0] for line in lines] == [run.name for run in runs]
    assert remedies.startswith("Try ")


def test_flags_and_settings_are_code():
    text = "pass --same_flop, or `lbd 0.5` (not a--b) for <i>"
    assert with_code(text) == ("pass <code>--same_flop</code>, or <code>lbd 0.5</code> (not a--b) for &lt;i&gt;")


def test_scores_and_errors(tmp_path):
    first = make_run(tmp_path / "a", "1100", lenient="1110", stopped="1101")
    html = accuracy_section(read_runs([first, make_run(tmp_path / "b", "1000", seed=3)])).html
    scores, a, _, errors, *counts, others, b, _ = rows(html)
    assert scores == ["run", "exact", "prefix", "stopped by itself"]
    assert a[1:] == ["50.0% [15.0, 85.0]", "75.0% [30.1, 95.4]", "75.0% [30.1, 95.4]"]
    assert [errors, *counts] == [["run", "wrong answer"], ["a", "2 (50.0%)"], ["b", "3 (75.0%)"]]
    assert others == ["run", "LM loss on right answers", "cosine, matched", "cosine, shuffled"]
    assert b == ["a", "0.5", "0.75", "0.25"]


def test_a_column_in_which_nothing_is_known_is_not_shown(tmp_path):
    folder = make_run(tmp_path / "a", "1100")
    change(folder / "test.summary.json", "similarity", to=None)
    html = accuracy_section(read_runs([folder])).html
    assert "cosine" not in "".join(map("".join, rows(html))) and "–" not in html


def test_arms_are_compared_over_seeds(arms):
    html = comparison_section(compare_runs(read_runs(arms))).html
    assert html.index("no arm is shown to be better than regular") < html.index("<table") < html.index("data:image/svg")
    assert [len(row) for row in rows(html)[:3]] == [6, 6, 6]
    assert all(f"<li>{text}" in html for text in ("arm: runs that differ only in their seed", "p: of a one-tailed"))
    # Differences of 25, 0 and 50 points: mean 25, standard error 14.43, t of 2 degrees of freedom 4.303.
    assert "+25.00 [-37.10, +87.10]" in html


def test_retrieval_stands_beside_the_answers(arms):
    for place, folder in enumerate(arms):
        retrieve(folder, 0.02 + 0.71 * (place > 2), layer=2 if place > 2 else -1)
    section = comparison_section(compare_runs(read_runs(arms)))
    assert "By embeddings, the nearest answer is right: regular 2.0%, step-jepa" in section.parts[0].verdicts[1]
    heads, regular, step = rows(section.html)[:3]
    nearest = ["nearest answer right", "its difference in points"]
    assert heads[2:] == ["right answers", "difference in points", "p", *nearest, "same budget"]
    assert (regular[5:7], step[5:7]) == (["2.0% ± 0.0", "–"], ["73.0% ± 0.0", "+71.0"])
    assert f"{nearest[0]}: by embeddings" in section.html
    last = draw(compare_runs(read_runs(arms))[0][1]).axes[-1]
    assert (last.get_title(), last.get_xlabel()) == ("nearest answer right", "share of questions, %")
    # Every note is a sentence, and none holds a raw object.
    assert section.parts[0].notes and "{" not in "".join(section.parts[0].notes)


def test_an_arm_has_one_colour_in_the_picture_and_in_the_curves(arms):
    runs = read_runs(arms)
    _, comparison, _ = compare_runs(runs)[0]
    markers = [line.get_color() for line in draw(comparison).axes[0].lines if line.get_marker() == "D"]
    look = looks(runs, comparison)
    assert markers == [look[run.name][0] for run in runs[::3]] == list(PALETTE[:2])


def test_each_evaluation_is_compared_by_itself_or_says_why_not(arms):
    for folder in arms[::3]:
        evaluate(folder, "1111", name="dev")
    change(arms[0] / "dev.summary.json", "task", to="other")
    compared = compare_runs(read_runs(arms))
    assert [(name, comparison is None) for name, comparison, _ in compared] == [("dev", True), ("test", False)]
    assert "The runs are not compared: " in comparison_section(compared).html
    with pytest.raises(UserError, match="`baseline`: no arm"):
        compare_runs(read_runs(arms[1:3] + arms[4:]), baseline="other")


def test_a_sweep_names_its_arms(tmp_path, arms):
    names = [(arm, seed) for arm in ("step", "regular") for seed in (2, 3)]
    trials = [{"name": f"{arm}/seed{seed}", "arm": arm, "label": f"{arm} of mine"} for arm, seed in names]
    text = json.dumps({"grid": {"baseline": "step"}, "trials": trials})
    (tmp_path / "sweep.json").write_text(text, encoding="utf-8")
    ((_, comparison, _),) = compare_runs(read_runs([tmp_path]))
    assert [arm.name for arm in comparison.arms] == ["step of mine", "regular of mine"]


def test_answers_are_those_of_the_lines(tmp_path):
    folder = make_run(tmp_path / "one", "101", lenient="111", stopped="110")
    output = ["3", "</script><b>", "3 3 3"]
    say(folder, prompt=["S\nWhat is 3?", "S\nWhat is 5?", "S\nWhat is 7?"], truth=[["3", "three"], "5", "3"])
    section = answers_section(read_runs([say(folder, generated=output)]))
    value = json.loads(re.search(r'id="answers-data">(.*?)</script>', section.html, re.DOTALL)[1])
    (result,) = value
    assert (result["run"], result["name"], result["headline"]) == ("one", "test", "exact match")
    assert result["scores"] == ["exact", "prefix"] and result["begin"] == "S\n"
    # index, prompt, right answer, generated, right, stopped, error, scores
    index, prompt, truth, generated, right, stopped, error, scores = map(list, zip(*result["answers"], strict=True))
    assert index == [0, 1, 2] and generated == output
    assert prompt == ["What is 3?", "What is 5?", "What is 7?"]
    assert truth == ["3\nthree", "5", "3"]
    assert right == [True, False, True] and stopped == [True, True, False]
    assert error == ["", "wrong answer", ""] and scores == [[1, 1], [0, 1], [1, 1]]
    assert shown_text("a\n\x1b[2J\u202eb\ud800") == "a\n\\x1b[2J\\u202eb\\ud800"


@pytest.mark.parametrize(
    ("prompts", "begin", "questions", "end"),
    [
        (
            ["<|s|>\nBe.<|e|>\n<|u|>Wo?<|e|>\n<|a|>\n", "<|s|>\nBe.<|e|>\n<|u|>Wie so?<|e|>\n<|a|>\n"],
            "<|s|>\nBe.<|e|>\n",
            ["<|u|>Wo?", "<|u|>Wie so?"],
            "<|e|>\n<|a|>\n",
        ),
        (["a\nthe same\n", "a\nthe same\n"], "a\nthe same\n", ["", ""], ""),
        (["x the end", "y the end"], "", ["x the end", "y the end"], ""),
        (["one<|e|>"], "", ["one<|e|>"], ""),
    ],
)
def test_what_all_prompts_begin_and_end_with_is_there_once(
    prompts: list[str], begin: str, questions: list[str], end: str, tmp_path: Path
) -> None:
    folder = say(make_run(tmp_path / "one", "1" * len(prompts)), prompt=prompts)
    section = answers_section(read_runs([say(folder, generated="x")]))
    (result,) = json.loads(re.search(r'id="answers-data">(.*?)</script>', section.html, re.DOTALL)[1])
    assert (result["begin"], result["end"]) == (begin, end)
    assert [answer[1] for answer in result["answers"]] == questions


def test_pictures_of_an_analysis(tmp_path):
    folder = make_run(tmp_path / "run", "1")
    (folder / "look").mkdir()
    for name in ("analysis.json", "a.png", "projection.png"):
        (folder / "look" / name).write_text(name)
    html = embedding_section(read_runs([folder])).html
    assert re.findall("<figcaption>(.*?)<", html) == ["projection", "a"]
    assert 'src="data:image/png;base64,cHJvamVjdGlvbi5wbmc="' in html
    assert not embedding_section(read_runs([folder]), str(tmp_path)).parts


def test_retrieval_has_a_table_where_a_run_has_it(tmp_path):
    folders = [
        make_run(tmp_path / name, "110", jepa={"mode": "llm-jepa", "predictors": k}) for k, name in enumerate("ab")
    ]
    assert len(accuracy_section(read_runs(folders)).parts[0].tables) == 2
    retrieve(folders[1], 0.125)
    table = accuracy_section(read_runs(folders)).parts[0].tables[1]
    assert "Intervals are of 95%, for the choice of examples" in table.title
    readout = "views llm-jepa, layer -1, pooling last"
    cells = ("12.5% [7.5, 17.5]", "22.5% [17.5, 27.5]", "32.5% [27.5, 37.5]", "42.5% [37.5, 47.5]", "11", "7", readout)
    assert table.rows == [("a", *["–"] * 7), ("b", *cells)]


def test_retrieval_behind_each_map_has_a_table_of_its_own(tmp_path):
    folders = [
        make_run(tmp_path / name, "110", jepa={"mode": "llm-jepa", "predictors": k}) for k, name in enumerate("ab")
    ]
    retrieve(folders[0], 0.125)
    retrieve(folders[1], 0.125, behind_map=0.75, behind_heads=0.5)
    for table, name, mean in zip(
        accuracy_section(read_runs(folders)).parts[0].tables[2:4],
        ("a linear map", "projection heads"),
        ("75.0% [75.0, 75.0]", "50.0% [50.0, 50.0]"),
        strict=True,
    ):
        assert table.title.endswith(f"behind {name}, fitted on known pairs")
        cells = (*[mean] * 4, "11", "7", "views llm-jepa, layer 3, pooling last")
        assert table.rows == [("a", *["–"] * 7), ("b", *cells)]
