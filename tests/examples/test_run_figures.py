"""Figures of runs are written down and read back whole, and give the comparison that the run folders give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_figures import Figures, from_folder, read_figures, write_figures

from made_up_runs import make_run
from stepjepa.errors import UserError
from stepjepa.experiments.comparison import compare, compare_runs

LLM = {"mode": "llm-jepa", "lbd": 0.5}
# Of seven examples: a prime, no multiple of the bits of a hexadecimal digit.
RIGHT = {"regular": {23: "0100000", 82: "1000001"}, "jepa": {23: "0111000", 82: "1110001"}}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / f"{arm}-{seed}", right, seed=seed, jepa=LLM if arm == "jepa" else None, flops=7e9)
        for arm, seeds in RIGHT.items()
        for seed, right in seeds.items()
    ]


@pytest.fixture
def figures(folders: list[Path]) -> list[Figures]:
    return [from_folder(folder, folder.name.partition("-")[0], "test") for folder in folders]


def test_what_is_written_is_read_back(figures: list[Figures], tmp_path: Path) -> None:
    file = tmp_path / "figures" / "a.json"
    write_figures(file, figures)
    found = {each.key: each for each in read_figures(file)}
    assert list(found) == [("jepa", "23"), ("jepa", "82"), ("regular", "23"), ("regular", "82")]
    for each in figures:
        elsewhere = replace(each.run, folder=Path(f"{each.label}/seed{each.run.seed}"))
        assert found[each.key] == replace(each, run=elsewhere)
    # "1000001" by hand: 65, in two digits.
    run = next(one for one in json.loads(file.read_text())["runs"] if (one["arm"], one["seed"]) == ("regular", "82"))
    assert (run["examples"]["headline"], run["indices"]) == ("41", 7)


def test_the_comparison_is_that_of_the_folders(figures: list[Figures], folders: list[Path], tmp_path: Path) -> None:
    write_figures(tmp_path / "a.json", figures)
    of_file = compare_runs([each.run for each in read_figures(tmp_path / "a.json")], names=["jepa", "regular"])
    of_folders = compare(folders, names=["regular", "jepa"])
    assert of_file.differences == of_folders.differences
    assert of_file.differences["jepa"].measures["headline"] is not None


def test_scores_that_are_no_verdicts_and_chosen_examples(figures: list[Figures], tmp_path: Path) -> None:
    shares = {"headline": [0.25, 1.0, 0.0], "lenient": [0.0, 1.0, 0.0], "stopped": None}
    odd = replace(figures[0], run=replace(figures[0].run, indices=[2, 3, 11], examples=shares))
    write_figures(tmp_path / "a.json", [odd])
    (found,) = read_figures(tmp_path / "a.json")
    assert (found.run.examples, found.run.indices) == (shares, [2, 3, 11])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:40], "not valid JSON"),
        (lambda text: text.replace("figures 1", "figures 9"), "is no file of figures"),
        (lambda text: text.replace('"41"', '"ffff"'), "is damaged"),
        (lambda text: text.replace('"arm": "jepa"', '"arm": "other"'), "is damaged"),
        (lambda text: text.replace('"common": 0', '"common": 5'), "is damaged"),
        (lambda text: text.replace('"steps": 10', '"step": 10'), "is damaged"),
    ],
)
def test_a_damaged_file_is_named(figures: list[Figures], tmp_path: Path, damage, said: str) -> None:
    file = tmp_path / "a.json"
    write_figures(file, figures)
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    with pytest.raises(UserError, match=rf"a\.json.*{said}"):
        read_figures(file)
