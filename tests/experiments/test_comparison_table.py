"""A comparison as text, Markdown, CSV, LaTeX, JSON and picture: the same numbers, and nothing that breaks them."""

import csv
import io
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from made_up_runs import make_run
from stepjepa.errors import UserError
from stepjepa.experiments.comparison import compare
from stepjepa.experiments.comparison_plot import check_picture, draw, write_picture
from stepjepa.experiments.comparison_table import FORMATS, as_dict, latex_escape, tables
from stepjepa.experiments.verdict import verdict

LLM = {"mode": "llm-jepa"}
RIGHT = {
    "regular": {23: "11000000", 37: "11100000", 82: "10000000"},
    "jepa": {23: "11110000", 37: "11100100", 82: "11110000", 4: "11111111"},
}


@pytest.fixture
def runs(tmp_path):
    made = []
    for name, seeds in RIGHT.items():
        for seed, right in seeds.items():
            jepa, tokens = (LLM, 1500.0) if name == "jepa" else (None, 1000.0)
            stopped = right if name == "regular" else None
            parts = {"jepa": jepa, "tokens": tokens, "stopped": stopped, "flops": 8e9 * tokens}
            made.append(make_run(tmp_path / f"{name}-{seed}", right, seed=seed, **parts))
    return made


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
    arms, seeds, examples, each = map(rows_of, tables(compare(runs)))
    # jepa: 4, 4, 4 and 8 of 8: mean 5/8, std sqrt((3 + 9) / 3) / 8 = 2/8.
    assert arms == [
        {
            "arm": "regular",
            "seeds": "3",
            "exact": "25.00% ± 12.50",
            "prefix": "25.00% ± 12.50",
            "stop rate": "25.00% ± 12.50",
            "LM loss": "0.500",
            "matched": "0.750",
            "shuffled": "0.250",
            "tokens": "1,000",
            "seconds": "2",
            "FLOPs": "8e+12",
        },
        {
            "arm": "llm-jepa",
            "seeds": "4",
            "exact": "* 62.50% ± 25.00",
            "prefix": "62.50% ± 25.00",
            "stop rate": "100.00% ± 0.00",
            "LM loss": "0.500",
            "matched": "0.750",
            "shuffled": "0.250",
            "tokens": "1,500",
            "seconds": "2",
            "FLOPs": "1.2e+13",
        },
    ]
    # Differences 2, 1, 3 eighths: 25 points, std 12.5, half the interval 4.3027 * 12.5 / sqrt(3) = 31.05.
    (row,) = seeds
    assert row == {
        "arm": "llm-jepa",
        "pairs": "3",
        "Δ exact": "+25.00 [-6.05, +56.05]",
        "Δ prefix": "+25.00 [-6.05, +56.05]",
        "Δ stop rate": "+75.00 [+43.95, +106.05]",
        "p, one-tailed": "0.0371",
        "p, two-tailed": "0.0742",
        "Holm": "0.0371",
        "tokens": "× 1.50",
        "FLOPs": "× 1.50",
    }
    (row,) = examples
    assert row == {
        "arm": "llm-jepa",
        "gained": "6",
        "of them prefix before": "0",
        "lost": "0",
        "p, one-tailed": "0.0625",
        "p, two-tailed": "0.1250",
        "Holm": "0.0625",
    }
    assert [tuple(row.values()) for row in each] == [
        ("regular", "23", "25.00%", "25.00%", "25.00%", "–", "–", "–", "regular-23"),
        ("regular", "37", "37.50%", "37.50%", "37.50%", "–", "–", "–", "regular-37"),
        ("regular", "82", "12.50%", "12.50%", "12.50%", "–", "–", "–", "regular-82"),
        ("llm-jepa", "4", "100.00%", "100.00%", "100.00%", "–", "–", "–", "jepa-4"),
        ("llm-jepa", "23", "50.00%", "50.00%", "100.00%", "2", "0", "0.5000", "jepa-23"),
        ("llm-jepa", "37", "50.00%", "50.00%", "100.00%", "1", "0", "1.0000", "jepa-37"),
        ("llm-jepa", "82", "50.00%", "50.00%", "100.00%", "3", "0", "0.2500", "jepa-82"),
    ]


IN_GROUPS = {
    "At equal steps": ["llm-jepa K=1", "llm-jepa K=2"],
    "At equal FLOPs": ["llm-jepa K=1", "llm-jepa K=3"],
    "At neither equal steps nor FLOPs": ["llm-jepa K=4"],
}


def test_arms_are_grouped_by_what_is_equal_in_every_format(groups):
    comparison = compare(groups)
    titles = [table.title.partition(", against regular, paired by ")[::2] for table in tables(comparison)[1:-1]]
    assert titles[0][1].startswith("seed")
    assert titles[3][1].startswith("example")
    assert [heading for heading, _ in titles] == 2 * list(IN_GROUPS)
    for (heading, _), table in zip(titles, tables(comparison)[1:-1], strict=True):
        assert [row[0] for row in table.rows] == IN_GROUPS[heading]
        assert "Holm's correction" in table.title
        assert table.title.endswith("over all arms of all groups")
    ratios = {row["arm"]: row["FLOPs"] for table in tables(comparison)[1:4] for row in rows_of(table)}
    assert list(ratios.values()) == ["× 1.01", "× 2.00", "× 0.99", "× 1.50"]
    for kind in ("text", "markdown", "latex"):
        text = FORMATS[kind](comparison)
        places = [text.index(f"{heading}, against") for heading in IN_GROUPS]
        assert places == sorted(places)
        assert text.count("At equal FLOPs, against") == 2
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](comparison))))
    assert [row["equal"] for row in rows] == ["", "steps FLOPs", "steps", "FLOPs", "neither"]
    assert [float(row["flops_ratio"]) for row in rows[1:]] == [1.0125, 2, 0.9875, 1.5]
    assert [float(row["flops_mean"]) for row in rows] == [8e12, 8.1e12, 16e12, 7.9e12, 12e12]
    value = json.loads(FORMATS["json"](comparison))
    assert [arm["difference"]["equal"] for arm in value["arms"][1:]] == [["steps", "FLOPs"], ["steps"], ["FLOPs"], []]
    labels = [label.get_text() for label in draw(comparison).axes[0].get_yticklabels()]
    ends = ["[steps, FLOPs]", "[steps]", "[FLOPs]", "[neither steps nor FLOPs]"]
    assert labels == ["regular", *(f"llm-jepa K={k} {end}" for k, end in enumerate(ends, start=1))]


def test_text_fits_80_columns_and_begins_with_the_verdict(runs):
    for names, first in (((), "llm-jepa"), (("regular", "step-jepa layout=inplace lbd=0.5 predictors=2"), "(2)")):
        text = FORMATS["text"](compare(runs, names=names))
        assert max(map(len, text.splitlines())) <= 80
        assert text.startswith("at equal steps, better than regular in exact: ")
        # Every table is aligned, and names its row in each of its blocks.
        for block in re.findall(r"(?m)^arm .*\n-.*\n(?:.+\n)+", text):
            head, rule, *rows = block.splitlines()
            assert len(head) == len(rule) == max(map(len, rows))
            assert rows[-1].startswith(first)
        assert f"{first} step-jepa layout" in text or not names
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
    assert verdict(compare(groups)) == (
        "at equal steps, no arm is shown to be better than regular in exact; at equal FLOPs, no arm is shown to be "
        "better than regular in exact; at neither equal steps nor FLOPs, no arm is shown to be better than regular in "
        "exact; without two seeds in common with the baseline nothing can be shown over seeds"
    )


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("last_token=-2", r"last\_token=-2"),
        ("12% ± 3", r"12\% $\pm$ 3"),
        ("< 0.0001", "$<$ 0.0001"),
        ("a\\b", r"a\textbackslash{}b"),
        ("--lbd ---", "-{}-lbd -{}-{}-"),
    ],
)
def test_latex_escapes(text, escaped):
    assert latex_escape(text) == escaped


def test_latex_takes_the_tables(groups, tmp_path):
    """Names that LaTeX would read as its own, at the places where it would."""
    comparison = compare(groups, names=["regular", "[x] a|b", "*50% & {x}\\ ~^#$", 'é "q" `r\'', "-2 --flag $m_1$ <x>"])
    assert r"| [x] a\|b |" in FORMATS["markdown"](comparison)
    latex = FORMATS["latex"](comparison)
    # Else they would belong to the end of the row before.
    assert not re.search(r"^[\[*]", latex, re.MULTILINE)
    if (
        shutil.which("pdflatex") is None
        or subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, check=False).returncode
    ):
        pytest.skip("pdflatex or booktabs is not installed")
    page = r"\documentclass{article}\usepackage[paperwidth=60cm]{geometry}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text(f"{page}\n{latex}\n\\end{{document}}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


def test_json_and_csv_hold_every_number(runs):
    comparison = compare(runs)
    value = json.loads(FORMATS["json"](comparison))
    assert value == json.loads(json.dumps(as_dict(comparison)))
    assert (value["baseline"], value["corrected"]) == ("regular", "one-tailed p, Holm")
    assert value["notes"] == list(comparison.notes)
    regular, jepa = value["arms"]
    assert regular["difference"] is None
    assert jepa["headline"] == {"n": 4, "mean": 0.625, "std": pytest.approx(0.25)}
    assert jepa["settings"]["mode"] == "llm-jepa"
    found = jepa["difference"]
    assert found["seeds"] == ["23", "37", "82"]
    assert set(found["headline"]) == {*("n", "mean", "std", "low", "high", "t", "p_greater", "p_two_sided")}
    assert found["headline"]["t"] == pytest.approx(12**0.5)
    assert (found["by_example"]["gained"], found["gained_lenient_before"], found["token_ratio"]) == (6, 0, 1.5)
    assert [run["mcnemar"] and run["mcnemar"]["gained"] for run in jepa["runs"]] == [None, 2, 1, 3]
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](comparison))))
    assert [row["arm"] for row in rows] == ["regular", "llm-jepa"]
    assert float(rows[1]["headline_mean"]) == 0.625
    assert float(rows[1]["headline_difference_p_greater"]) == found["headline"]["p_greater"]
    assert float(rows[1]["example_p_two_sided"]) == found["by_example"]["p_two_sided"]
    assert (rows[1]["paired_seeds"], rows[1]["example_gained"], rows[0]["example_gained"]) == ("23 37 82", "6", "")


def test_the_picture_shows_means_deviations_seeds_and_the_baseline(runs):
    figure = draw(compare(runs))
    assert [axes.get_title() for axes in figure.axes] == ["exact", "prefix", "stop rate"]
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["regular", "llm-jepa [steps]"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    (baseline,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(baseline.get_xdata()) == [25, 25]
    dots = [sorted(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[12.5, 25, 37.5], [50, 50, 50, 100]]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"] == [25, 62.5]
    bars = [sorted(segment[:, 0]) for bar in axes.collections for segment in bar.get_segments()]
    assert bars == [pytest.approx([12.5, 37.5]), pytest.approx([37.5, 87.5])]


def test_pictures_are_whole_and_always_the_same(runs, tmp_path):
    comparison = compare(runs, names=["$x_1$ 日本", "_b"])
    for kind in ("png", "svg"):
        files = [tmp_path / f"{place}.{kind}" for place in (1, 2)]
        for file in files:
            write_picture(comparison, file)
        assert files[0].read_bytes() == files[1].read_bytes()
    assert ElementTree.parse(tmp_path / "1.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "1.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"a\.pdf: --plot draws \.png or \.svg"):
        check_picture("a.pdf")
