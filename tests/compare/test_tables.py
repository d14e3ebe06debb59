"""A comparison as text, Markdown and JSON: the same numbers, and nothing that breaks them."""

import json
import re

import pytest

from made_up_runs import make_run
from stepjepa.compare.comparison import compare, verdict
from stepjepa.compare.tables import FORMATS, tables

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


def test_every_format_says_what_is_equal(groups):
    comparison = compare(groups)
    rows = rows_of(tables(comparison)[1])
    assert [row["equal"] for row in rows] == ["steps, FLOPs", "steps", "FLOPs", "neither"]
    assert [row["FLOPs"] for row in rows] == ["× 1.01", "× 2.00", "× 0.99", "× 1.50"]
    value = json.loads(FORMATS["json"](comparison))
    assert [arm["difference"]["equal"] for arm in value["arms"][1:]] == [["steps", "FLOPs"], ["steps"], ["FLOPs"], []]
    assert "| llm-jepa K=1 | steps, FLOPs |" in FORMATS["markdown"](comparison)


def test_text_fits_80_columns_and_begins_with_the_verdict(runs):
    text = FORMATS["text"](compare(runs))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("at equal steps, better than regular in exact: ")
    # Every table is aligned, and names its row in each of its blocks.
    blocks = re.findall(r"(?m)^arm .*\n-.*\n(?:.+\n)+", text)
    assert len(blocks) > 4
    for block in blocks:
        head, rule, *rows = block.splitlines()
        assert len(head) == len(rule) == max(map(len, rows))
        assert rows[-1].startswith("llm-jepa")
    assert "note: " in text


def test_the_verdict_by_hand(runs, groups):
    """Differences 2, 1, 3 eighths: mean 25, std 12.5; of one-tailed tests with 2 degrees of freedom."""
    # (2.920 + 1.061) * 12.5 / sqrt(3)
    assert verdict(compare(runs)) == (
        "at equal steps, better than regular in exact: llm-jepa by +25.00 points [-6.05, +56.05] over 3 seeds "
        "(one-tailed Holm p 0.0371); 3 seeds could have shown a difference of 28.7 points (in 80% of cases)"
    )
    # (4.303 + 1.061) * 12.5 / sqrt(3)
    assert verdict(compare(runs, tails="two")) == (
        "at equal steps, no arm is shown to be better than regular in exact; 3 seeds could have shown a difference of "
        "38.7 points (in 80% of cases)"
    )
    no = ", no arm is shown to be better than regular in exact"
    assert verdict(compare(groups)).split("; ") == [
        *(f"at equal steps{no}", f"at equal FLOPs{no}", f"at neither equal steps nor FLOPs{no}"),
        "without two seeds in common with the baseline nothing can be shown over seeds",
    ]


def test_json_holds_every_number(runs):
    comparison = compare(runs)
    value = json.loads(FORMATS["json"](comparison))
    assert (value["baseline"], value["corrected"]) == ("regular", "one-tailed p, Holm")
    assert value["notes"] == list(comparison.notes)
    regular, jepa = value["arms"]
    assert regular["difference"] is None
    assert jepa["headline"] == {"n": 4, "mean": 0.625, "std": pytest.approx(0.25)}
    assert jepa["settings"]["mode"] == "llm-jepa"
    found = jepa["difference"]
    assert found["seeds"] == ["23", "37", "82"]
    assert set(found["headline"]) == {*("n", "mean", "std", "low", "high", "t", "p_greater", "p_two_sided")}
    assert set(found) == {
        *("seeds", "headline", "lenient", "stopped", "holm", "by_example", "by_example_holm"),
        *("gained_lenient_before", "token_ratio", "flops_ratio", "equal"),
    }
    assert (found["by_example"]["gained"], found["gained_lenient_before"], found["token_ratio"]) == (6, 0, 1.5)
    assert [run["mcnemar"] and run["mcnemar"]["gained"] for run in jepa["runs"]] == [None, 2, 1, 3]
