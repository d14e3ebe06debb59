"""What can't be compared is refused, and named."""

import json
from pathlib import Path

import pytest

from made_up_runs import PROTOCOL, change, make_run
from stepjepa.errors import UserError
from stepjepa.experiments.comparison import compare

LLM = {"mode": "llm-jepa", "lbd": 0.5}

DIFFERENT = [
    ("run.json", ("data", "train", "sha256"), "e" * 64, r"training data \(sha256\) is e+\.\.\. instead of d"),
    ("run.json", ("system_prompts",), ["Sum."], r'system prompts of training is \["Sum\."\] instead of \["Add\."\]'),
    ("test.summary.json", ("test_fingerprint",), "0" * 64, r"test file \(sha256\) is 0+\.\.\. instead of f"),
    ("test.summary.json", ("headline",), "prefix", "headline is prefix instead of exact"),
    ("test.summary.json", ("settings", "max_new_tokens"), 32, "max new tokens is 32 instead of 16"),
    ("test.summary.json", ("settings", "prompt"), {"system": "x", "plain": False}, 'prompt is {"system": "x"'),
    ("test.summary.json", ("settings",), {"missing": "wrong"}, "task options is unknown instead of {}"),
]


@pytest.mark.parametrize(("file", "path", "value", "words"), DIFFERENT, ids=[words for *_, words in DIFFERENT])
def test_what_is_different_is_refused_and_named(file, path, value, words, runs):
    change(runs[4] / file, *path, to=value)
    with pytest.raises(UserError, match=words) as caught:
        compare(runs)
    assert str(caught.value).startswith(f"{runs[4]}: can't be compared with {runs[0]}: ")


def test_records_that_a_task_leaves_out(runs):
    def renumber(folder, indices):
        lines = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
        numbered = [line | {"index": index} for line, index in zip(lines, indices, strict=True)]
        (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in numbered))

    before = compare(runs)
    for folder in runs:
        renumber(folder, [0, 2, 3, 4, 5, 6, 8, 9])
    assert compare(runs).differences == before.differences
    renumber(runs[5], [0, 2, 3, 4, 5, 7, 8, 9])
    with pytest.raises(UserError, match="only one of them was asked example 6") as caught:
        compare(runs)
    assert str(caught.value).startswith(f"{runs[5]}: can't be compared with {runs[0]}")
    for wrong in ([0, 2, 3, 4, 5, 6, 8, 8], [2, 0, 3, 4, 5, 6, 8, 9]):
        renumber(runs[5], wrong)
        with pytest.raises(UserError, match="its 8 lines are not the 8 examples"):
            compare(runs)


@pytest.mark.parametrize("split", [{"eval_split": 0.2, "split_seed": 1}, {"eval_split": 0.1, "split_seed": 2}])
def test_another_split_of_the_same_file_is_other_data(split, tmp_path):
    parts = {"sha256": "d" * 64, "eval_split": 0.1, "split_seed": 1}
    folders = [make_run(tmp_path / "a", "10", data={"data": parts})]
    folders.append(make_run(tmp_path / "b", "10", jepa=LLM, data={"data": {**parts, **split}}))
    name = next(name for name in split if split[name] != parts[name])
    with pytest.raises(UserError, match=f"{name.replace('_', ' ')} is {split[name]} instead of {parts[name]}"):
        compare(folders)


def test_what_may_differ_between_evaluations(runs):
    for name, value in {"similarity": "llm-jepa", "batch_size": 3, "seed": 5, "base_model": "other"}.items():
        assert PROTOCOL[name] is None
        change(runs[4] / "test.summary.json", "settings", name, to=value)
    assert compare(runs).differences


def test_a_seed_twice_is_refused(runs, tmp_path):
    again = make_run(tmp_path / "again", "1" * 8, seed=23)
    with pytest.raises(UserError) as caught:
        compare([*runs, again])
    assert str(caught.value) == f"{again}: is of the same arm and seed (23) as {runs[0]}; leave one out"


BROKEN = [
    ("run.json", None, "is no run folder"),
    ("run.json", "{", "run.json:1: is damaged"),
    ("run.json", '{"status": "running"}', r"the run is not finished \(status 'running'\)"),
    ("run.json", '{"status": "finished"}', "run.json: 'jepa' is missing, expected an object; restore"),
    ("test.summary.json", "{", r"test.summary.json:1: is damaged: not valid JSON \(.*\); evaluate"),
    ("test.jsonl", None, "test.jsonl: no such file of answers"),
    ("test.jsonl", "{}\n", "test.jsonl:1: 'index' is missing, expected a whole number of at least 0; evaluate"),
    ("test.jsonl", '{"index": 0}\n', "its 1 lines are not the 8 examples of test.summary.json"),
]


@pytest.mark.parametrize(("file", "content", "words"), BROKEN, ids=[f"{file} {words}" for file, _, words in BROKEN])
def test_broken_folders_are_refused(file, content, words, runs):
    broken: Path = runs[1] / file
    broken.unlink() if content is None else broken.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        compare(runs)
    assert str(runs[1]) in str(caught.value)


def test_lines_of_another_evaluation_are_refused(runs):
    lines = (runs[1] / "test.jsonl").read_text()
    (runs[0] / "test.jsonl").write_text(lines)
    with pytest.raises(UserError, match=r"its lines don't give the mean of test.summary.json"):
        compare(runs)
