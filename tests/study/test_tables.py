"""A comparison as text, Markdown, JSON and picture: the same numbers, and nothing that breaks them."""

import json
import re
from xml.etree import ElementTree

import pytest

from made_up_runs import make_run
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.study.comparison import compare
from stepjepa.study.plot import CAPTION, check_picture, draw, picture
from stepjepa.study.run_report import report, report_text
from stepjepa.study.tables import FORMATS, legend, overview, tables

LLM = {"mode": "llm-jepa"}
RIGHT = {
    "regular": {23: "11000000", 37: "11100000", 82: "10000000"},
    "jepa": {23: "11110000", 37: "11100100", 82: "11110000", 4: "11111111"},
}


@pytest.fixture
def runs(tmp_path):
    regular = [
        make_run(tmp_path / f"regular-{seed}", right, seed=seed, stopped=right, flops=8e12)
        for seed, right in RIGHT["regular"].items()
    ]
    return regular + [
        make_run(tmp_path / f"jepa-{seed}", right, seed=seed, jepa=LLM, tokens=1500.0, flops=1.2e13)
        for seed, right in RIGHT["jepa"].items()
    ]


@pytest.fixture
def groups(tmp_path):
    """Four arms: one equal in both, in steps, in FLOPs, in neither."""
    made = [make_run(tmp_path / "regular", "1100", flops=8e12)]
    for k, (steps, flops) in enumerate([(10, 8.1e12), (10, 16e12), (5, 7.9e12), (7, 12e12)], start=1):
        jepa = {**LLM, "predictors": k}
        made.append(make_run(tmp_path / f"k{k}", "1110", jepa=jepa, steps=steps, flops=flops))
    return made


def rows_of(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_tables_by_hand(runs):
    arms, seeds, examples = map(rows_of, tables(compare(runs)))
    # jepa: 4, 4, 4 and 8 of 8: mean 5/8, std sqrt((3 + 9) / 3) / 8 = 2/8.
    figures = {"LM loss": "0.500", "matched": "0.750", "shuffled": "0.250", "seconds": "2"}
    same = dict.fromkeys(("exact", "prefix", "stop rate"), "25.00% ± 12.50")
    assert arms == [
        {"arm": "regular", "seeds": "3", **same, **figures, "tokens": "1,000", "FLOPs": "8e+12"},
        dict(
            zip(arms[0], ("llm-jepa", "4", "* 62.50% ± 25.00", "62.50% ± 25.00", "100.00% ± 0.00"), strict=False),
            **{**figures, "tokens": "1,500", "FLOPs": "1.2e+13"},
        ),
    ]
    # Differences 2, 1, 3 eighths: 25 points, std 12.5, half the interval 4.3027 * 12.5 / sqrt(3) = 31.05.
    ends = "[-6.05, +56.05]"
    points = {"Δ exact": f"+25.00 {ends}", "Δ prefix": f"+25.00 {ends}", "Δ stop rate": "+75.00 [+43.95, +106.05]"}
    p_values = {"p, one-tailed": "0.0371", "p, two-tailed": "0.0742", "Holm": "0.0371"}
    assert seeds == [
        {"arm": "llm-jepa", "equal": "steps", "pairs": "3", **points, **p_values, "tokens": "× 1.50", "FLOPs": "× 1.50"}
    ]
    assert [tuple(row.values()) for row in examples] == [("llm-jepa", "6", "0", "0", "0.0625", "0.1250", "0.0625")]


def test_the_first_table_has_six_columns_and_a_sentence_on_each(runs):
    comparison = compare(runs)
    table = overview(comparison)
    assert [table.columns, *table.rows] == [
        ("arm", "runs", "right answers", "difference in points", "p", "same budget"),
        ("regular", "3", "25.0% ± 12.5", "–", "–", "baseline"),
        ("llm-jepa", "4", "* 62.5% ± 25.0", "+25.0 [-6.1, +56.1]", "0.0371", "steps"),
    ]
    explained = [line.partition(":")[0] for line in legend(comparison)]
    assert explained == ["arm", "right answers", "*", "difference", "p", "same budget"]
    assert all(f"\n{line[:40]}" in str(comparison) for line in legend(comparison))


def test_where_the_best_are_equal_none_has_a_star(tmp_path):
    runs = [make_run(tmp_path / "a", "1100"), make_run(tmp_path / "b", "0011", jepa=LLM)]
    comparison = compare(runs)
    assert "*" not in str(comparison).replace("**", "") and "*" not in comparison.details
    assert "* 50" not in report_text(report(runs))


def test_the_best_run_of_a_report_is_named_and_marked(tmp_path):
    text = report_text(report([make_run(tmp_path / name, right) for name, right in (("a", "1100"), ("b", "1110"))]))
    assert text.startswith("best by exact match: b with 75.0% [") and "; lenient: prefix; whether" in " ".join(
        text.split()
    )
    assert "nearest right" not in text
    accuracies = dict(re.findall(r"^([ab]) +regular +0 +((?:\* )?[\d.]+%) \[", text, re.MULTILINE))
    assert accuracies == {"a": "50.0%", "b": "* 75.0%"}
    # Of means over several samples there is no interval.
    for run in (tmp_path / "a", tmp_path / "b"):
        lines = [json.loads(line) for line in (run / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        write_jsonl(run / "test.jsonl", [{**line, "scores": {"exact": 0.25, "prefix": 0.5}} for line in lines])
    text = report_text(report([tmp_path / "a", tmp_path / "b"]))
    assert text.startswith("best by exact match: 2 of 2 runs with 25.0%; lenient: prefix; whether")


def test_every_format_says_what_is_equal(groups):
    comparison = compare(groups)
    rows = rows_of(tables(comparison)[1])
    assert [row["equal"] for row in rows] == ["steps, FLOPs", "steps", "FLOPs", "neither"]
    assert [row["FLOPs"] for row in rows] == ["× 1.01", "× 2.00", "× 0.99", "× 1.50"]
    value = json.loads(FORMATS["json"](comparison))
    assert [arm["difference"]["equal"] for arm in value["arms"][1:]] == [["steps", "FLOPs"], ["steps"], ["FLOPs"], []]
    assert "| llm-jepa K=1 | steps, FLOPs |" in FORMATS["markdown"](comparison)


def test_text_fits_80_columns_and_begins_with_the_verdict(runs):
    comparison = compare(runs)
    text = comparison.details
    for each in (text, str(comparison)):
        assert max(map(len, each.splitlines())) <= 80
        assert each.startswith("at equal steps, better than regular in right answers (exact match): ")
    # Every table is aligned, and names its row in each of its blocks.
    blocks = re.findall(r"(?m)^arm .*\n-.*\n(?:.+\n)+", text)
    assert len(blocks) > 4
    for block in blocks:
        head, rule, *rows = block.splitlines()
        assert len(head) == len(rule) == max(map(len, rows))
        assert rows[-1].startswith("llm-jepa")
    assert "note: " in text


def test_arms_of_long_names_are_numbered(tmp_path):
    """So that there is room for numbers in 80 columns; the names are listed once."""
    long = {**LLM, "layout": "branched", "lbd": 0.123456789, "pooling": "mean", "predictors": 13}
    runs = [make_run(tmp_path / "a", "1100"), make_run(tmp_path / "b", "1110", jepa=long)]
    runs.append(make_run(tmp_path / "c", "1110", jepa={**long, "lbd": 0.2, "pooling": "last", "predictors": 7}))
    text = FORMATS["text"](compare(runs))
    assert "(2) llm-jepa K=13 lbd=0.123457 pooling=mean" in text
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith(("(", "arm", "-")))
    assert "\n(2)  " in text


def test_the_verdict_by_hand(runs, groups):
    """Differences 2, 1, 3 eighths: mean 25, std 12.5; of one-tailed tests with 2 degrees of freedom."""
    # noncentrality 3.98, at which t of 2 degrees of freedom is above 2.920 in 80 %: 3.98 * 12.5 / sqrt(3)
    assert compare(runs).verdict == (
        "at equal steps, better than regular in right answers (exact match): llm-jepa by +25.00 points "
        "[-6.05, +56.05] over 3 seeds (one-tailed Holm p 0.0371); 3 seeds could have shown a difference of 28.7 points "
        "(in 80% of cases)"
    )
    # noncentrality 5.653, at which it is above 4.303 in 80 %: 5.653 * 12.5 / sqrt(3)
    assert compare(runs, tails="two").verdict == (
        "at equal steps, no arm is shown to be better than regular in right answers (exact match); 3 seeds could have "
        "shown a difference of 40.8 points (in 80% of cases)"
    )
    no = ", no arm is shown to be better than regular in right answers (exact match)"
    assert compare(groups).verdict.split("; ") == [
        *(f"at equal steps{no}", f"at equal FLOPs{no}", f"at neither equal steps nor FLOPs{no}"),
        "without two seeds in common with the baseline nothing can be shown over seeds",
    ]


def test_the_verdict_says_what_is_worse_equal_or_beyond_what_seeds_can_show(tmp_path):
    """Eighths by seed: 6, 7, 8 of the baseline; two fewer or three; equally many fewer; 6 and 8 of two seeds."""
    rights = {"regular": (6, 7, 8), "worse": (4, 5, 5), "equal": (3, 4, 5), "vary": (0, 8)}
    folders = [
        make_run(
            tmp_path / f"{name}{seed}",
            "1" * count + "0" * (8 - count),
            seed=seed,
            jepa={**LLM, "predictors": k} if k else None,
        )
        for k, (name, counts) in enumerate(rights.items())
        for seed, count in enumerate(counts)
    ]
    where = "than regular in right answers (exact match)"
    # Worse by 2, 2, 3 eighths: mean 29.17, std 7.22, t = 7 with 2 degrees of freedom, p .0198, times three arms .0594;
    # without the others .0198. A difference of 7.22 / sqrt(3) * 5.653 can be shown, see above.
    assert compare(folders[:6], tails="two").verdict.split("; ") == [
        f"at equal steps, no arm is shown to be better {where}",
        f"at equal steps, worse {where}: llm-jepa by -29.17 points [-47.09, -11.24] over 3 seeds "
        "(two-tailed Holm p 0.0198)",
        "3 seeds could have shown a difference of 23.6 points (in 80% of cases)",
    ]
    assert "worse" not in compare(folders[:6]).verdict
    parts = compare(folders, tails="two").verdict.split("; ")
    assert [part.partition(": ")[0] for part in parts] == [
        f"at equal steps, no arm is shown to be better {where}",
        "3 seeds could have shown a difference of 40.9 points (in 80% of cases)",
        "no difference of llm-jepa K=3 could have been shown",
        "differences that are equal for all seeds can't be tested",
    ]
    assert parts[-1].endswith(": those of llm-jepa K=2")
    # Several arms of which nothing could have been shown are in one sentence.
    for seed, count in enumerate((8, 0)):
        jepa = {**LLM, "predictors": 4}
        folders.append(make_run(tmp_path / f"v{seed}", "1" * count + "0" * (8 - count), seed=seed, jepa=jepa))
    (beyond,) = [part for part in compare(folders).verdict.split("; ") if part.startswith("no difference")]
    assert beyond.startswith("no difference of llm-jepa K=3 or llm-jepa K=4 could have been shown: with 2 seeds it ")


def test_arms_without_a_common_seed_are_equal_in_no_known_budget(tmp_path):
    folders = [make_run(tmp_path / "a", "1100", seed=1, flops=1e9)]
    folders += [make_run(tmp_path / "b", "1110", seed=2, flops=1e9, jepa=LLM)]
    comparison = compare(folders)
    assert comparison.verdict == "without two seeds in common with the baseline nothing can be shown over seeds"
    assert [row["equal"] for row in rows_of(tables(comparison)[1])] == ["–"]
    assert comparison.table["equal"].tolist() == [None, None]
    assert not any("comparable at equal FLOPs" in note for note in comparison.notes)
    draw(comparison)


def test_json_holds_every_number(runs):
    comparison = compare(runs)
    value = json.loads(FORMATS["json"](comparison))
    assert (value["baseline"], value["corrected"]) == ("regular", "one-tailed p, Holm")
    assert value["notes"] == list(comparison.notes)
    regular, jepa = value["arms"]
    assert regular["difference"] is None
    assert jepa["headline"] == {"n": 4, "mean": 0.625, "std": pytest.approx(0.25)}
    assert jepa["settings"]["mode"] == "llm-jepa"
    result = jepa["difference"]
    assert result["seeds"] == ["23", "37", "82"]
    assert set(result["headline"]) == {*("n", "mean", "std", "low", "high", "t", "p_greater", "p_two_sided")}
    assert set(result) == {
        *("seeds", "headline", "lenient", "stopped", "holm", "by_example", "by_example_holm"),
        *("gained_lenient_before", "token_ratio", "flops_ratio", "equal", "over_linear_map"),
        "over_projection_heads",
    }
    assert (result["by_example"]["gained"], result["gained_lenient_before"], result["token_ratio"]) == (6, 0, 1.5)
    assert [run["mcnemar"] and run["mcnemar"]["gained"] for run in jepa["runs"]] == [None, 2, 1, 3]


@pytest.mark.slow
def test_the_picture_shows_means_deviations_seeds_and_the_baseline(runs, tmp_path):
    comparison = compare(runs)
    figure = draw(comparison)
    assert [axes.get_title() for axes in figure.axes] == ["exact match", "prefix", "stop rate"]
    axes = figure.axes[0]
    (baseline,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(baseline.get_xdata()) == [25, 25]
    dots = [sorted(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[12.5, 25, 37.5], [50, 50, 50, 100]]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"] == [25, 62.5]
    bars = [sorted(segment[:, 0]) for bar in axes.collections for segment in bar.get_segments()]
    assert bars == [pytest.approx([12.5, 37.5]), pytest.approx([37.5, 87.5])]
    for kind in ("png", "svg"):
        files = [tmp_path / f"{place}.{kind}" for place in (1, 2)]
        for file in files:
            file.write_bytes(picture(comparison, kind))
        assert files[0].read_bytes() == files[1].read_bytes()
    assert draw(comparison).get_suptitle() == CAPTION and not draw(comparison, captioned=False).get_suptitle()
    assert len(picture(comparison, "svg", captioned=False)) < len(picture(comparison, "svg"))
    assert ElementTree.parse(tmp_path / "1.svg").getroot().tag.endswith("svg")
    with pytest.raises(UserError, match=r"a\.pdf: `plot` draws \.png or \.svg"):
        check_picture("a.pdf")


def test_axes_of_percentages_end_at_0_and_100(tmp_path):
    made = [make_run(tmp_path / mode, "00", jepa={"mode": mode}, stopped="11") for mode in ("regular", "llm-jepa")]
    limits = {axes.get_title(): axes.get_xlim() for axes in draw(compare(made)).axes}
    # The least width of 5 points; Matplotlib's 94.5 to 105.5; a fiftieth more on either side for markers.
    assert limits["exact match"] == pytest.approx((-0.1, 5.1))
    assert limits["stop rate"] == pytest.approx((94.39, 100.11))
    wide = [make_run(tmp_path / name, right, jepa=jepa) for name, right, jepa in (("a", "00", None), ("b", "11", LLM))]
    assert draw(compare(wide)).axes[0].get_xlim() == pytest.approx((-2, 102))
