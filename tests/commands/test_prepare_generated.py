"""``stepjepa prepare stepmath`` and ``nl-rx``: generated and converted files, and what is refused."""

import json
from collections import Counter

import pytest

from stepjepa.cli import main
from stepjepa.commands import prepare_generated
from stepjepa.data.sources import read_records
from stepjepa.tasks import nl_rx
from stepjepa.tasks.nl_rx import NlRxTask
from stepjepa.tasks.registry import choose_task


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch):
    monkeypatch.setattr(nl_rx, "_DRAWS", dict.fromkeys(nl_rx._DRAWS, 3000))


def prepare(*arguments):
    assert main(["prepare", *map(str, arguments)]) == 0


def pairs_of(path):
    return [(record.messages[1]["content"], record.answer) for record in read_records(path)]


def test_stepmath_writes_train_and_test(tmp_path, capsys):
    folder = tmp_path / "problems"
    sizes = ("--train_size", 60, "--test_size", 20)
    prepare("stepmath", "--output_dir", folder, *sizes)
    train, test = (read_records(folder / f"{part}.jsonl") for part in ("train", "test"))
    assert (len(train), len(test)) == (60, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["test.jsonl", "train.jsonl"]
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["60", "20"]

    before = (folder / "train.jsonl").read_bytes()
    prepare("stepmath", "--output_dir", folder, *sizes, "--overwrite")
    assert (folder / "train.jsonl").read_bytes() == before
    prepare("stepmath", "--output_dir", folder, *sizes, "--overwrite", "--seed", 1)
    assert (folder / "train.jsonl").read_bytes() != before


def test_two_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    whole = prepare_generated.atomic_write

    def full_disk(path, mode="w"):
        if path.name == "test.jsonl":
            raise OSError(28, "No space left on device")
        return whole(path, mode)

    monkeypatch.setattr(prepare_generated, "atomic_write", full_disk)
    sizes = ["--train_size", "3", "--test_size", "2"]
    assert main(["prepare", "stepmath", "--output_dir", str(tmp_path), *sizes]) != 0
    assert not list(tmp_path.iterdir())


def test_nl_rx_generates_records_of_the_task_and_a_test_file_apart(tmp_path, capsys):
    train, test = tmp_path / "new" / "train.jsonl", tmp_path / "test.jsonl"
    flags = ("--size", 200, "--seed", 3, "--test_size", 50, "--test_file", test)
    prepare("nl-rx", *flags, "--output_file", train)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["200", "50"]
    records = read_records(train)
    assert (len(records), len(pairs_of(test))) == (200, 50)
    assert isinstance(choose_task("auto", records), NlRxTask)
    for record in records:
        NlRxTask().truth(record)
    for part in (0, 1):
        assert not {pair[part] for pair in pairs_of(train)} & {pair[part] for pair in pairs_of(test)}


def test_the_published_files_become_the_published_records(shared_data, tmp_path):
    folder, made = shared_data / "nl_rx", tmp_path / "made.jsonl"
    files = ("--source_file", folder / "NL-RX-Synth.src.txt", "--target_file", folder / "NL-RX-Synth.targ.txt")
    prepare("nl-rx", *files, "--output_file", made)
    theirs = [
        json.loads(line)
        for part in ("train", "test")
        for line in (shared_data / "llm_jepa" / f"synth_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    ours = [json.loads(line) for line in made.read_text(encoding="utf-8").splitlines()]
    assert len(ours) == 10000
    assert Counter(map(json.dumps, ours)) == Counter(map(json.dumps, theirs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stepmath --output_dir OUT --max_steps 1", "--max_steps: expected 2 (min_steps) to 8, got 1"),
        ("stepmath --output_dir OUT --operations power", "got power"),
        ("stepmath --output_dir OUT --train_size 0", "--train_size: expected 1 or more, got 0"),
        ("stepmath --output_dir OUT --operations double --max_steps 2", "--test_size: expected"),
        ("nl-rx --output_file OUT --size 0", "--size: expected 1 or more, got 0"),
        ("nl-rx --output_file OUT --size 90000", "--size: expected a size that the grammar has pairs for, got 90000"),
        ("nl-rx --output_file OUT --test_file x", "give both --test_size and --test_file, or neither"),
        ("nl-rx --output_file OUT --test_file OUT --test_size 5", "is both --output_file and --test_file"),
        ("nl-rx --output_file OUT --source_file a", "give both --source_file and --target_file"),
        ("nl-rx --output_file OUT --source_file a --target_file b", "a: no such text file"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(nl_rx, "_PATIENCE", 2)
    out = tmp_path / "out"
    assert main(["prepare", *arguments.replace("OUT", str(out)).split()]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("sentences", "regexes", "message"),
    [
        ("a\nb\n", "c\n", "x.src.txt: has 2 lines, but "),
        ("a\n\n", "c\nd\n", "x.src.txt:2: no sentence"),
        ("a\nb\n", "c\n(d\n", "x.src.txt:2: no regular expression of NL-RX"),
    ],
)
def test_files_that_do_not_go_together_are_refused(tmp_path, capsys, sentences, regexes, message):
    source, target = tmp_path / "x.src.txt", tmp_path / "x.targ.txt"
    source.write_text(sentences, encoding="utf-8")
    target.write_text(regexes, encoding="utf-8")
    files = ("--source_file", source, "--target_file", target, "--output_file", tmp_path / "made.jsonl")
    assert main(["prepare", "nl-rx", *map(str, files)]) == 2
    assert message in capsys.readouterr().err
