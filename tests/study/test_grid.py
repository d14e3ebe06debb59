"""Grids: what is trained, under which names, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from stepjepa.base.errors import UserError
from stepjepa.cli.parser import as_arguments
from stepjepa.study.grid import Grid, Trial, expand, read_grid, select


def accept(flags: dict[str, Any]) -> dict[str, Any]:
    """Read the flags of a command that takes any but ``bad...`` and ``lbd: x``, and leaves out those that are null."""
    for name, value in flags.items():
        if name.startswith("bad"):
            raise UserError(f"unknown argument '--{name}={value}'; did you mean --good?")
        if (name, value) == ("lbd", "x"):
            raise UserError("argument --lbd/--lambda: invalid float value: 'x'")
    return {name: value for name, value in flags.items() if value is not None}


def grid_of(folder: Path, **values: Any) -> Grid:
    (folder / "grid.yaml").write_text(yaml.safe_dump({"seeds": [1], **values}, sort_keys=False))
    return read_grid(folder / "grid.yaml")


def trials_of(folder: Path, **values: Any) -> list[Trial]:
    return expand(grid_of(folder, **values), accept, as_arguments)


def test_a_grid_expanded_by_hand(tmp_path: Path) -> None:
    trials = trials_of(
        tmp_path,
        seeds=[82, 23],
        train={"model_name": "m", "lbd": 0.1},
        evaluate={"test_file": "t"},
        arms={"regular": {"regular": True, "lbd": None}, "jepa": {"lbd": [0.5, 2.0], "predictors": [0, 1], "k-k": -1}},
    )
    expected: list[tuple[str, str, dict[str, Any]]] = [
        ("regular", "regular", {"model_name": "m", "regular": True}),
        ("jepa_lbd0.5_predictors0", "jepa", {"model_name": "m", "lbd": 0.5, "predictors": 0, "k_k": -1}),
        ("jepa_lbd0.5_predictors1", "jepa", {"model_name": "m", "lbd": 0.5, "predictors": 1, "k_k": -1}),
        ("jepa_lbd2.0_predictors0", "jepa", {"model_name": "m", "lbd": 2.0, "predictors": 0, "k_k": -1}),
        ("jepa_lbd2.0_predictors1", "jepa", {"model_name": "m", "lbd": 2.0, "predictors": 1, "k_k": -1}),
    ]
    assert trials == [
        Trial(f"{label}/seed{seed}", arm, label, seed, {**flags, "finetune_seed": seed}, ("--test_file=t",))
        for label, arm, flags in expected
        for seed in (82, 23)
    ]


def test_the_baseline_comes_first_and_is_added_if_it_is_regular(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, arms={"jepa": {}})
    assert list(grid.arms) == ["regular", "jepa"]
    assert grid.arms["regular"] == {"regular": True}
    assert list(grid_of(tmp_path, arms={"jepa": {}, "plain": {}}, baseline="plain").arms) == ["plain", "jepa"]
    (tmp_path / "grid.yaml").write_text("arms: {jepa: {}}")
    assert read_grid(tmp_path / "grid.yaml").seeds == (82, 23, 37, 84, 4)


def test_a_shared_flag_that_the_added_baseline_does_not_take_is_named_where_it_stands(tmp_path: Path) -> None:
    def read(flags: dict[str, Any]) -> dict[str, Any]:
        if "regular" in flags and "lbd" in flags:
            raise UserError("`regular` has no views, so `lbd` does nothing with it; leave one out")
        return flags

    grid = grid_of(tmp_path, train={"lbd": 0.1}, arms={"jepa": {}})
    with pytest.raises(UserError, match="arms that it is for; arm 'regular' is added as the baseline") as error:
        expand(grid, read, as_arguments)
    assert "grid.yaml:4: train.lbd: `regular` has no views" in str(error.value)
    # An arm of the file is named with its own line.
    grid = grid_of(tmp_path, train={"lbd": 0.1}, arms={"regular": {"regular": True}})
    with pytest.raises(UserError, match=r"grid.yaml:7: arms.regular.regular: .* leave one out$"):
        expand(grid, read, as_arguments)


def test_names_are_file_names_unique_and_stable(tmp_path: Path) -> None:
    values = ["a/b", "a-b", "a b", "../x", ".", "", "é", "x" * 300, "x" * 300 + "y", {"a": 1}, {"a": 2}, "1_0"]
    labels = [trial.label for trial in trials_of(tmp_path, arms={"a": {"f": values}})[1:]]
    assert len({label.casefold() for label in labels}) == len(values)
    assert all(set(label) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.+-") for label in labels), labels
    assert labels[:2] == ["a_f-a-b-c14cdd", "a_f-a-b"]
    plain = trials_of(tmp_path, arms={"a": {"f": [0.5, "1e-5", True, "l2"]}})[1:]
    assert [trial.label for trial in plain] == ["a_f0.5", "a_f1e-5", "a_f-true", "a_f-l2"]
    # More arms, values and seeds leave the names of the others as they are.
    before = {trial.name for trial in trials_of(tmp_path, arms={"a": {"f": [1, 2]}})}
    after = {trial.name for trial in trials_of(tmp_path, seeds=[9, 1], arms={"b": {}, "a": {"f": [3, 2, 1]}})}
    assert before < after


def test_numbers_keep_their_spelling_where_it_may_matter(tmp_path: Path) -> None:
    """Not in the names of trials, which are those of sweeps that earlier versions began."""
    (tmp_path / "grid.yaml").write_text("evaluate: {test_file: 1.10}\narms: {jepa: {lbd: [1.10, 1.0e-5]}}\nseeds: [1]")
    regular, *others = expand(read_grid(tmp_path / "grid.yaml"), accept, as_arguments)
    assert regular.evaluate == ("--test_file=1.10",)
    assert [trial.label for trial in others] == ["jepa_lbd1.1", "jepa_lbd1e-05"]
    assert [as_arguments(trial.train)[0] for trial in others] == ["--lbd=1.10", "--lbd=1.0e-5"]
    text = "evaluate: {test_file: 007, name: 2026-11-27}\narms: {jepa: {run_name: [010, true]}}\nseeds: [1_000, 010]"
    (tmp_path / "grid.yaml").write_text(text)
    _, _, *others = expand(read_grid(tmp_path / "grid.yaml"), accept, as_arguments)
    assert others[0].evaluate == ("--test_file=007", "--name=2026-11-27")
    assert [as_arguments(trial.train)[0] for trial in others[::2]] == ["--run_name=010", "--run_name=true"]
    assert [trial.seed for trial in others] == [1000, 10] * 2 and {type(trial.seed) for trial in others} == {int}


def test_a_nested_list_is_a_flag_of_several_values(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, arms={"a": {"f": [["x", "y"], ["z"]]}}, train={"g": [1, 2]})
    assert [trial.train["f"] for trial in trials[1:]] == [["x", "y"], ["z"]]
    assert as_arguments({"a": {"b": 1}, "c": None, "d": "--e"}) == ['--a={"b": 1}', "--d=--e"]


YAML = """\
train:
  model_name: m
  lbd: 0.1
evaluate: {test_file: t}
arms:
  jepa:
    predictors: [0, 1]
seeds: [1, 2]
"""

REFUSED = [
    ("lbd: 0.1", "lbd: x", "grid.yaml:3: train.lbd: argument --lbd/--lambda: invalid float value"),
    ("lbd: 0.1", "bad-flag: 0.1", "grid.yaml:3: train.bad_flag: unknown argument '--bad_flag=0.1'; did you mean"),
    ("lbd: 0.1", "seed: 3", "grid.yaml:3: train.seed: is set by the sweep itself; leave it out; write 'seeds'"),
    ("lbd: 0.1", "model_name: n", "grid.yaml:3: not valid YAML (the key 'model_name' occurs twice)"),
    ("predictors: [0, 1]", "a-b: 1\n    a_b: 2", "grid.yaml:8: arms.jepa.a_b: is set twice; leave one out"),
    ("predictors: [0, 1]", "p: [0, 0]", "grid.yaml:6: arms.jepa: 'jepa_p0' has the same settings as 'jepa_p0'"),
    ("predictors: [0, 1]", "predictors: []", "grid.yaml:7: arms.jepa.predictors: an empty list"),
    (
        "seeds: [1, 2]",
        "seeds: [1, 1]",
        "grid.yaml:8: seeds: expected different whole numbers of 0 to 2**32 - 1, got [1, 1]",
    ),
    ("seeds: [1, 2]", "seeds: [4294967296]", "grid.yaml:8: seeds: expected different whole numbers of 0 to 2**32 - 1"),
    ("seeds: [1, 2]", "baseline: llm", "grid.yaml:8: baseline: there is no arm 'llm'; name one of jepa"),
    ("  jepa:", "  a/b:", "grid.yaml:5: arms: an arm's name begins with a letter"),
    ("    predictors: [0, 1]", "    - 3", "grid.yaml:6: arms.jepa: holds a list; expected 'flag: value' lines"),
    (YAML, "- 3", "grid.yaml: expected the keys train, evaluate, arms, seeds, baseline"),
]


@pytest.mark.parametrize(("old", "new", "words"), REFUSED, ids=[new[:30] for _, new, _ in REFUSED])
def test_what_is_refused_is_named_with_its_place(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(YAML, encoding="utf-8")
    assert len(expand(read_grid(path), accept, as_arguments)) == 6
    assert old in YAML
    path.write_text(YAML.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        expand(read_grid(path), accept, as_arguments)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_seeds_of_the_command_line_are_refused_by_their_flag(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(YAML, encoding="utf-8")
    with pytest.raises(UserError, match=r"^seeds: expected different whole numbers of 0 to 2\*\*32 - 1, got "):
        read_grid(path, [-1])


def test_only_chooses_by_arm_and_seed(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, seeds=[82, 23], arms={"a": {"f": [1, 2]}})
    only = {None: 6, "a_f1": 2, "regular,82": 1, "82, regular, 23": 2, "a_f1/seed82,regular/seed23": 2}
    assert {names: len(select(trials, names)) for names in only} == only
    with pytest.raises(UserError, match=r"only: no arm, seed or trial is called 'b'; there are regular, a_f1"):
        select(trials, "82,b")
