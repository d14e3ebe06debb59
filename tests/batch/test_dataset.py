"""One door for all records, and a cache that never gives other data than preparing anew."""

from __future__ import annotations

import copy
import gc
import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.batch import prepare as module
from stepjepa.batch.dataset import Prepared, SampleKey, count_tokens
from stepjepa.batch.prepare import prepare
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.views.layouts import LAYOUTS, Layout
from stepjepa.views.sequences import SampledRecord, TokenizedRecord, common_prefix

STEPS = JepaConfig(mode="step-jepa")


def dicts() -> list[dict[str, Any]]:
    return [{"messages": list(record.messages), "more": number} for number, record in enumerate(tiny.records())]


def plain(record: TokenizedRecord) -> Any:
    """Everything of a record as lists."""
    pairs = [
        [(view.ids.tolist(), view.start, view.end, view.in_main, view.predictors) for view in pair]
        for pair in record.pairs
    ]
    return record.ids.tolist(), record.labels.tolist(), record.prompt.tolist(), pairs, record.line


def contents(prepared: Prepared) -> list[Any]:
    items = [prepared.dataset[index] for index in range(len(prepared.dataset))]
    return [plain(item.record) for item in items if item is not None]


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [JepaConfig(max_length=4096), replace(STEPS, pairs="all")])
def test_every_door_leads_to_the_same_tokens(config: JepaConfig, trained_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    write_jsonl(file, dicts())
    wanted = [plain(record) for record in RecordTokenizer(trained_tokenizer, config).tokenize(tiny.records())]
    assert max(len(pairs) for *_, pairs, _ in wanted) == (3 if config.pairs == "all" else 1)
    memory = [replace(record, path="<memory>") for record in tiny.records()]
    for data in [memory, dicts(), iter(dicts()), datasets.Dataset.from_list(dicts()), str(file), file]:
        prepared = prepare(data, trained_tokenizer, config)
        assert contents(prepared) == wanted
        assert prepared.source == (str(file) if isinstance(data, str | Path) else "<memory>")
        assert prepared.tokens["main"] == sum(len(ids) for ids, *_ in wanted) == prepared.dataset.lengths.sum()


@pytest.mark.parametrize("options", [{}, {"front_pred": True}, {"reverse_pred": True}], ids=str)
@pytest.mark.parametrize("base", [JepaConfig(), JepaConfig(layout="branched"), replace(STEPS, pairs="all")])
def test_tokens_of_views_are_those_that_the_layout_adds(
    base: JepaConfig, options: dict[str, bool], trained_tokenizer: Any
) -> None:
    config = replace(base, predictors=3, max_length=4096, **options)
    made = tiny.tokenized(trained_tokenizer, config)
    added = 0
    for record in made:
        main, *others = tiny.collator(trained_tokenizer, config).sequences(SampledRecord(record))
        for sequence in others:
            (readout,) = sequence.readouts
            is_first = (readout.kind == "source") != config.reverse_pred
            pair = record.pairs[readout.pair]
            in_main = (pair.first if is_first else pair.second).in_main
            added += len(sequence) - (common_prefix(sequence.ids, main.ids) if in_main else 0)
    assert added > 0
    assert count_tokens(made, config)["all"] == sum(len(record.ids) for record in made) + added


def test_useless_data_is_refused(trained_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an object with the keys train, test; pass one of them"):
        prepare({"train": [], "test": []}, trained_tokenizer, STEPS)
    with pytest.raises(UserError, match=r"^training data: holds no records; add at least one$"):
        prepare([], trained_tokenizer, STEPS)
    with pytest.raises(
        UserError, match=r"has a pair \(the last answer has too few steps.*\); set `step_separator blank`, or"
    ):
        prepare(dicts(), trained_tokenizer, replace(STEPS, step_separator="##"))
    (tmp_path / "d.jsonl").write_text('{"Frage": "a", "Antwort": "b"}\n')
    # Python has no setting that names columns.
    with pytest.raises(UserError, match=r"\(there is Frage, Antwort\); rename the two to prompt and completion$"):
        prepare(tmp_path / "d.jsonl", trained_tokenizer, STEPS)


# -- looking up --------------------------------------------------------------------------------------------------------


def test_the_error_of_a_long_record_names_the_longest(trained_tokenizer: Any, monkeypatch: Any) -> None:
    """Otherwise each run would name the next record, with a ``max_length`` for that one alone."""
    words = [3, 11, 7, 5, 13]
    records = [replace(tiny.make_record("S", "why " * count, "so"), line=line) for line, count in enumerate(words)]
    lengths = [len(RecordTokenizer(trained_tokenizer, STEPS).tokenize([record])[0].ids) for record in records]
    limit = lengths[0]
    with pytest.raises(UserError) as caught:
        prepare(records, trained_tokenizer, JepaConfig(mode="regular", max_length=limit))
    others = f"4 of the first 5 records are too long, the longest has {lengths[4]} tokens"
    fault = f"1: the record has {lengths[1]} tokens, more than max_length {limit}; {others}: raise `max_length`, or "
    assert fault in str(caught.value)
    with pytest.raises(UserError, match=rf"more than max_length {lengths[1]}; raise"):  # one record alone
        prepare(records, trained_tokenizer, JepaConfig(mode="regular", max_length=lengths[1]))
    monkeypatch.setattr(module, "SURVEYED", 3)
    with pytest.raises(UserError, match=rf"2 of the first 3 records are too long, the longest has {lengths[1]}"):
        prepare(records, trained_tokenizer, JepaConfig(mode="regular", max_length=limit))


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects: bool, trained_tokenizer: Any) -> None:
    try:
        (gc.enable if collects else gc.disable)()
        prepare(dicts(), trained_tokenizer, STEPS)
        assert gc.isenabled() == collects
        with pytest.raises(UserError, match="more than max_length 7"):
            prepare(dicts(), trained_tokenizer, replace(STEPS, max_length=7))
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_items_are_looked_up_by_key(trained_tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)
    prepared = prepare(dicts() * 3, trained_tokenizer, STEPS)
    table = prepared.dataset
    assert len(table) == len(table.lengths) == 9
    again = pickle.loads(pickle.dumps(table))
    for number in range(9):
        item, other = table[SampleKey(number, number % 2 == 0, 4)], again[number]
        assert item is not None and other is not None
        assert (item.with_views, item.rng_key) == (number % 2 == 0, (4, number))
        assert (other.with_views, other.rng_key) == (True, (0, number))
        assert plain(item.record) == plain(other.record)
        assert item.record.line == number + 1
        assert len(item.record.ids) == table.lengths[number]
    assert table[SampleKey(-1)] is None
    with pytest.raises(IndexError):
        table[9]


def test_skipped_records_take_no_place(trained_tokenizer: Any) -> None:
    records = [*tiny.records(), tiny.make_record("S", "q" * 300, "a\n\nb", line=4), *tiny.records()]
    lengths = prepare(tiny.records(), trained_tokenizer, STEPS).dataset.lengths
    prepared = prepare(records, trained_tokenizer, replace(STEPS, max_length=max(lengths), over_length="skip"))
    assert prepared.dataset.lengths.tolist() == [*lengths, *lengths]
    assert (prepared.counts["records"], prepared.counts["skipped"]) == (6, 1)


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_second_start_reads_what_the_first_wrote(trained_tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    notes: list[str] = []
    first = prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path, say=notes.append)
    assert (notes, len(list(tmp_path.glob("*.arrow")))) == ([], 1)
    monkeypatch.setattr(RecordTokenizer, "tokenize", lambda *_: pytest.fail("tokenised again"))
    second = prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path, say=notes.append)
    assert contents(second) == contents(first)
    assert replace(second, dataset=first.dataset) == first
    assert len(notes) == 1 and "training data as prepared before" in notes[0]
    item = second.dataset[0]
    assert not item.record.ids.flags.owndata and not item.record.ids.flags.writeable, "the memory of the file is shared"
    assert item.record.ids.dtype == item.record.labels.dtype == np.int32


def test_a_record_is_found_by_its_number_and_a_padding_slot_holds_none(trained_tokenizer: Any) -> None:
    dataset = prepare(tiny.records(), trained_tokenizer, STEPS).dataset
    last = len(dataset) - 1
    assert dataset[-1].rng_key == dataset[last].rng_key == (0, last)
    assert dataset[SampleKey(-1)] is None
    with pytest.raises(IndexError):
        dataset[last + 1]


def test_what_tokens_depend_on_makes_another_entry(trained_tokenizer: Any, monkeypatch: Any) -> None:
    def key(records: list[Record] | None = None, tokenizer: Any = trained_tokenizer, **changes: Any) -> str:
        return module.cache_key(records or tiny.records(), tokenizer, replace(STEPS, **changes))

    keys = [key(), key(max_length=99), key(labels="all"), key(predictors=3), key(tiny.records()[:2])]
    keys += [key([replace(record, line=7) for record in tiny.records()])]
    for change, value in (("split_special_tokens", True), ("clean_up_tokenization_spaces", True)):
        tokenizer = copy.deepcopy(trained_tokenizer)
        tokenizer.init_kwargs[change] = value
        setattr(tokenizer, change, value)
        keys.append(key(tokenizer=tokenizer))
    for change in ("chat_template", "pad_token"):
        tokenizer = copy.deepcopy(trained_tokenizer)
        setattr(tokenizer, change, (getattr(tokenizer, change) or "") + " " if change == "chat_template" else "a")
        keys.append(key(tokenizer=tokenizer))
    # A layout of the user's own, changed under the same name.
    first_turns = [lambda messages: [(0, 1)], lambda messages: [(1, 0)]]
    for own in ({}, {"views_in_text": True}, *({"partners": each} for each in first_turns)):
        made = Layout("mine", ("step-jepa",), place=LAYOUTS["branched"].place, **own)
        monkeypatch.setitem(LAYOUTS, "mine", made)
        keys.append(key(layout="mine"))
    monkeypatch.setattr(module, "version", lambda name: "0")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key(lbd=7.0, stp=0.5) == keys[0] == key([replace(record, path="elsewhere") for record in tiny.records()])


@pytest.mark.parametrize("damaged", ["arrow", "json"])
def test_a_damaged_entry_is_prepared_anew(damaged: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    wanted = contents(prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path))
    (file,) = tmp_path.glob(f"*.{damaged}")
    file.write_text("{")
    for _ in range(2):
        assert contents(prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path, say=notes.append)) == wanted
    assert len(notes) == 1 and "as prepared before" in notes[0]


@pytest.mark.parametrize("damaged", ["arrow", "json"])
def test_one_flipped_bit_anywhere_is_noticed(damaged: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    wanted = contents(prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path))
    (file,) = tmp_path.glob(f"*.{damaged}")
    whole = file.read_bytes()
    for place in range(7, len(whole), max(1, len(whole) // 23)):
        notes: list[str] = []
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        result = prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path, say=notes.append)
        # White space of the description may be another one.
        assert contents(result) == wanted, place
        assert (notes == []) == (file.read_bytes() == whole), place


def test_errors_leave_nothing_behind(trained_tokenizer: Any, tmp_path: Path) -> None:
    for config in (replace(STEPS, max_length=5), replace(STEPS, step_separator="##")):
        with pytest.raises(UserError):
            prepare(dicts(), trained_tokenizer, config, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_the_main_process_writes_and_where_it_can(
    trained_tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    notes: list[str] = []
    (tmp_path / "file").write_text("")
    result = prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path / "file", say=notes.append)
    assert len(result.dataset) == 3
    assert "nothing stored" in notes[0]
    monkeypatch.setenv("RANK", "1")
    assert len(prepare(dicts(), trained_tokenizer, STEPS, cache_dir=tmp_path / "cache").dataset) == 3
    assert not (tmp_path / "cache").exists()


# -- fingerprints ------------------------------------------------------------------------------------------------------


def fingerprints(tokenizer: Any, config: JepaConfig, records: list[Record] | None = None) -> tuple[str, str]:
    return prepare(records or tiny.records(), tokenizer, config).dataset.fingerprints()


def test_views_are_in_the_fingerprint_of_the_records_and_not_in_that_of_the_texts(trained_tokenizer: Any) -> None:
    configs = [JepaConfig(mode="regular"), JepaConfig(), STEPS, replace(STEPS, layout="inplace", pairs="all")]
    result = [fingerprints(trained_tokenizer, config) for config in configs]
    assert len({records for records, _ in result}) == len(configs)
    assert len({texts for _, texts in result}) == 1


def test_what_changes_the_texts_changes_both_fingerprints(trained_tokenizer: Any) -> None:
    regular, records = JepaConfig(mode="regular"), tiny.records()
    before = fingerprints(trained_tokenizer, regular)
    other, other_words = copy.deepcopy(trained_tokenizer), tiny.make_record("Add.", "A colour", "Red")
    other.chat_template = other.chat_template.replace("<|im_start|>", "<|im_start|>\n")
    changed = {
        "order": fingerprints(trained_tokenizer, regular, records[::-1]),
        "one less": fingerprints(trained_tokenizer, regular, records[:2]),
        "one word": fingerprints(trained_tokenizer, regular, [*records[:2], other_words]),
        "template": fingerprints(other, regular),
    }
    for name, after in changed.items():
        assert after[0] != before[0] and after[1] != before[1], name
    # Line numbers don't count.
    assert fingerprints(trained_tokenizer, regular, [replace(each, line=each.line + 7) for each in records]) == before


def test_fingerprints_equal_slow_ones_over_several_blocks(
    trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(STEPS, layout="inplace", pairs="first")
    before = fingerprints(trained_tokenizer, config)
    monkeypatch.setattr(module, "BLOCK", 2)
    assert fingerprints(trained_tokenizer, config) == before
    predictors = all_predictor_ids(trained_tokenizer)
    texts = hashlib.sha256()
    for record in RecordTokenizer(trained_tokenizer, config).tokenize(tiny.records()):
        texts.update(np.array([-1, *(each for each in record.ids if each not in predictors)], np.int32).tobytes())
    assert texts.hexdigest() == before[1]
