"""``stepjepa prepare nl-rx``: generated and converted files, and what is refused."""

import argparse
import json
from collections import Counter

import pytest

from stepjepa.commands.prepare_generated import NL_RX
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.tasks import nl_rx_grammar
from stepjepa.tasks.nl_rx import NlRxTask
from stepjepa.tasks.registry import choose_task


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch):
    monkeypatch.setattr(nl_rx_grammar, "_SMALL_DRAWS", 3000)
    monkeypatch.setattr(nl_rx_grammar, "_LARGE_DRAWS", 3000)


def prepare(*arguments):
    parser = argparse.ArgumentParser()
    NL_RX.add_arguments(parser)
    assert NL_RX.run(parser.parse_args([str(argument) for argument in arguments])) == 0


def pairs_of(path):
    return [(record.messages[1]["content"], record.answer) for record in read_records(path)]


def test_generates_records_of_the_task(tmp_path, capsys):
    target = tmp_path / "new" / "train.jsonl"
    prepare("--size", 200, "--seed", 3, "--output_file", target)
    assert capsys.readouterr().out == f"written to {target}      200\n"
    records = read_records(target)
    assert len(records) == 200
    assert {record.messages[0]["content"] for record in records} == {NlRxTask.system_prompt}
    assert isinstance(choose_task("auto", records), NlRxTask)
    for record in records:
        NlRxTask().truth(record)
    again = tmp_path / "again.jsonl"
    prepare("--size", 200, "--seed", 3, "--output_file", again)
    assert again.read_bytes() == target.read_bytes()
    prepare("--size", 200, "--seed", 4, "--output_file", again, "--overwrite")
    assert again.read_bytes() != target.read_bytes()


def test_generates_a_test_file_apart(tmp_path, capsys):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    prepare("--size", 200, "--test_size", 50, "--test_file", test, "--output_file", train)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["200", "50"]
    assert (len(pairs_of(train)), len(pairs_of(test))) == (200, 50)
    for part in (0, 1):
        assert not {pair[part] for pair in pairs_of(train)} & {pair[part] for pair in pairs_of(test)}


def published_files(tmp_path, sentences, regexes):
    source, target = tmp_path / "x.src.txt", tmp_path / "x.targ.txt"
    source.write_text(sentences, encoding="utf-8")
    target.write_text(regexes, encoding="utf-8")
    return "--source_file", source, "--target_file", target


def test_converts_the_published_pair_of_files(tmp_path, capsys):
    files = published_files(tmp_path, "lines with a number\nlines with é \n\nlast", "[0-9]\r\né\na\n(b\n")
    prepare(*files, "--output_file", tmp_path / "made.jsonl")
    assert pairs_of(tmp_path / "made.jsonl") == [("lines with a number", "[0-9]"), ("lines with é", "é")]
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert printed[:3] == ["read 4", "kept 2", "dropped 2"]
    assert "no sentence 1" in printed
    assert "no regular expression of NL-RX 1" in printed


def test_the_published_files_become_the_published_records(shared_data, tmp_path):
    folder, made = shared_data / "nl_rx", tmp_path / "made.jsonl"
    prepare(
        *("--source_file", folder / "NL-RX-Synth.src.txt", "--target_file", folder / "NL-RX-Synth.targ.txt"),
        *("--output_file", made),
    )
    theirs = [
        json.loads(line)
        for part in ("train", "test")
        for line in (shared_data / "llm_jepa" / f"synth_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    ours = [json.loads(line) for line in made.read_text(encoding="utf-8").splitlines()]
    assert len(ours) == 10000
    assert Counter(map(json.dumps, ours)) == Counter(map(json.dumps, theirs))
    # Turk has other sentences for the same expressions.
    turk = {record.answer for record in read_records(shared_data / "llm_jepa" / "turk_train.jsonl")}
    expressions = set((folder / "NL-RX-Turk.targ.txt").read_text().splitlines())
    assert turk <= expressions
    assert {json.loads(line)["messages"][2]["content"] for line in made.read_text().splitlines()} == expressions


def test_the_two_files_swapped_are_noticed(shared_data, tmp_path):
    folder = shared_data / "nl_rx"
    with pytest.raises(UserError, match=r"NL-RX-Synth\.src\.txt: holds words .*are the two files swapped\?"):
        prepare(
            *("--source_file", folder / "NL-RX-Synth.targ.txt", "--target_file", folder / "NL-RX-Synth.src.txt"),
            *("--output_file", tmp_path / "made.jsonl"),
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", 0], "--size: expected 1 or more, got 0"),
        (["--test_size", -1, "--test_file", "{folder}/test.jsonl"], "--test_size: expected 1 or more, got -1"),
        (["--test_file", "{folder}/test.jsonl"], "give both --test_size and --test_file, or neither"),
        (
            ["--test_size", 5, "--test_file", "{folder}/made.jsonl"],
            "{folder}/made.jsonl: is both --output_file and --test_file; name another",
        ),
        (
            ["--source_file", "a", "--target_file", "b", "--seed", 0],
            "--seed is for generated records, --source_file for published ones; leave one out",
        ),
        (["--source_file", "{folder}/a", "--target_file", "b"], "{folder}/a: no such text file; check the path"),
    ],
)
def test_what_is_refused(tmp_path, arguments, message):
    with pytest.raises(UserError) as caught:
        prepare(
            *(str(argument).replace("{folder}", str(tmp_path)) for argument in arguments),
            *("--output_file", tmp_path / "made.jsonl"),
        )
    assert str(caught.value) == message.replace("{folder}", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_files_that_do_not_go_together_are_refused(tmp_path):
    files = published_files(tmp_path, "a\nb\n", "c\n")
    with pytest.raises(UserError, match=r"x\.src\.txt: has 2 lines, but .*x\.targ\.txt has 1"):
        prepare(*files, "--output_file", tmp_path / "made.jsonl")
    with pytest.raises(UserError, match="is both input and output"):
        prepare(*files, "--output_file", files[1], "--overwrite")
    (tmp_path / "x.src.txt").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="not UTF-8 text"):
        prepare(*files, "--output_file", tmp_path / "made.jsonl")
    published_files(tmp_path, "\n", "c\n")
    with pytest.raises(UserError, match=r"no record could be kept \(no sentence: 1\)"):
        prepare(*files, "--output_file", tmp_path / "made.jsonl")


def test_a_size_beyond_the_grammar_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(nl_rx_grammar, "_PATIENCE", 2)
    with pytest.raises(UserError, match="--size: expected a size that the grammar has pairs for, got 9000"):
        prepare("--size", 9000, "--output_file", tmp_path / "made.jsonl")
    assert not list(tmp_path.iterdir())
