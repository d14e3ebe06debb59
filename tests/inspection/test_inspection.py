"""The description of records against their sequences, one by one; and what is said about files and records."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import chat_templates
import tiny
from stepjepa.base.errors import UserError
from stepjepa.batch.prepare import prepare
from stepjepa.chat.special_tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.inspection.record import Inspection, inspect_records, visible_matrix
from stepjepa.inspection.record_text import COLOURS, EDGE, NO_TEXT, READ, as_text, title, visible_text
from stepjepa.inspection.served import ShownTurn, shown_turns
from stepjepa.inspection.tree import token_text
from stepjepa.inspection.tree_picture import write_png
from stepjepa.models.presets import train_tokenizer
from stepjepa.views import layouts
from stepjepa.views.sequences import SampledRecord, TokenSequence, main_sequence

MODES = [
    ("regular", "separate"),
    ("llm-jepa", "separate"),
    ("llm-jepa", "branched"),
    ("step-jepa", "branched"),
    ("step-jepa", "inplace"),
]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _record(answer: str, line: int, question: str = "What is $3+4+5$?") -> Record:
    turns = [("system", "Add."), ("user", question), ("assistant", answer)]
    return parse_record({"messages": [{"role": role, "content": text} for role, text in turns]}, "sums.jsonl", line)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [
        _record("3+4=7.\n\n7+5=12\n\nSo it is\n\n12", 1),
        _record("Red\n\nBlue [bold]", 2, "Two\tcolours 日本"),
        _record("One", 4),
    ]


@pytest.fixture(scope="module")
def tokenizer(records: list[Record]) -> Any:
    made = train_tokenizer([m["content"] for record in records for m in record.messages], 300)
    add_predictor_tokens(made, 5)
    return made


def _config(mode: Any, layout: Any, **options: Any) -> JepaConfig:
    return JepaConfig(mode=mode, layout=layout, **options)


def _paths(found: Inspection) -> list[list[int]]:
    return [[place for start, end in each.places for place in range(start, end)] for each in found.sequences]


@pytest.mark.parametrize(("mode", "layout"), MODES)
@pytest.mark.parametrize("options", [{}, {"row_length": 71}, {"share_prefixes": False}, {"encoding": "rows"}], ids=str)
def test_the_tree_holds_what_training_runs_and_shows_each_token_its_own(
    records: list[Record], tokenizer: Any, mode: str, layout: str, options: dict[str, Any]
) -> None:
    if layout == "inplace" and "encoding" in options:
        pytest.skip("inplace is a tree by itself")
    config = _config(mode, layout, pairs="all", pooling="mean", predictors=3, **options)
    result = inspect_records(records, 0, tokenizer, config, count=3)
    collate = tiny.collator(tokenizer, config)
    made = [
        (record.line, collate.sequences(SampledRecord(record))) for record in tiny.tokenized(tokenizer, config, records)
    ]
    sequences = [(line, sequence) for line, each in made for sequence in each]
    value = json.loads(json.dumps(asdict(result)))["tokens"]
    paths = _paths(result)
    expected = np.zeros((len(value), len(value)), bool)
    labels: list[list[int]] = [[] for _ in value]
    reads = 0
    for (line, sequence), path, info in zip(sequences, paths, result.sequences, strict=True):
        assert [result.tokens[place].id for place in path] == sequence.ids.tolist()
        assert [result.tokens[place].position for place in path] == list(range(len(sequence)))
        assert info.shared == sum(sum(place in other for other in paths) > 1 for place in path)
        start = np.zeros(len(path), int) if sequence.start is None else sequence.start
        for query, place in enumerate(path):
            expected[place, path[start[query] : query + 1]] = True
        for position, token in sequence.labels:
            labels[path[position]].append(int(token))
        for pair, kind, first, last in sequence.readouts:
            reads += 1
            mean = f" (mean of {last - first} tokens)" if last > first + 1 else ""
            assert f"{kind} {pair + 1} of line {line}{mean}" in result.tokens[path[last - 1]].readouts
    assert (visible_matrix(result) == expected).all()
    ruled = [[q["start"] <= k["place"] <= q["place"] < k["end"] for k in value] for q in value]
    assert (np.array(ruled) == expected).all()
    assert [list(token.labels) for token in result.tokens] == labels
    assert sum(map(len, paths)) >= len(result.tokens) == len(set().union(*paths))
    assert sum(len(token.readouts) for token in result.tokens) == reads
    assert bool(reads) == (mode != "regular")


@pytest.mark.parametrize(("mode", "layout"), MODES)
def test_branches_are_runs_of_tokens_of_the_same_sequences(
    records: list[Record], tokenizer: Any, mode: str, layout: str
) -> None:
    result = inspect_records(records, 0, tokenizer, _config(mode, layout, pairs="all"), count=2)
    paths = _paths(result)
    assert [branch.start for branch in result.branches[1:]] == [branch.end for branch in result.branches[:-1]]
    assert result.branches[-1].end == len(result.tokens)
    for branch in result.branches:
        for place in range(branch.start, branch.end):
            assert [number for number, path in enumerate(paths) if place in path] == list(branch.sequences)
            assert result.tokens[place].branch == branch.index
        path = paths[branch.sequences[0]]
        depth = path.index(branch.start)
        before = None if depth == 0 else result.tokens[path[depth - 1]].branch
        assert branch.parent == before
        if len(branch.sequences) > 1:
            assert branch.kind == "shared"
        elif layout != "inplace":
            assert branch.kind == result.sequences[branch.sequences[0]].kind
    kinds = {branch.kind for branch in result.branches}
    assert kinds == ({"shared", "main"} if mode == "regular" else set(COLOURS) - {"other"})


def test_predictors_and_isolated_steps_in_place_have_branches_of_their_own(
    records: list[Record], tokenizer: Any
) -> None:
    result = inspect_records(records, 0, tokenizer, _config("step-jepa", "inplace", pairs="all", predictors=2))
    kinds = [branch.kind for branch in result.branches]
    assert kinds == ["main", *["source", "target"] * 3, "main"]
    assert [branch.isolated for branch in result.branches] == [kind == "target" for kind in kinds]
    assert [part["text"] for part in result.records[0]["steps"]] == ["3+4=7.\n\n", "7+5=12\n\n", "So it is\n\n", "12"]
    for branch, step in zip([b for b in result.branches if b.isolated], result.records[0]["steps"][1:], strict=True):
        assert "".join(token.text for token in result.tokens[branch.start : branch.end]) == step["text"]


def test_counts_are_of_the_whole_file(records: list[Record], tokenizer: Any) -> None:
    config = _config("step-jepa", "branched")
    result = inspect_records(records, 1, tokenizer, config)
    made = tiny.tokenized(tokenizer, config, records)
    assert (result.path, result.index, result.records[0]["line"], result.file["lines"]) == ("sums.jsonl", 1, 2, 3)
    assert [result.file["counts"][name] for name in ("records", "pairs", "without a pair")] == [3, 2, 1]
    assert result.file["tokens"]["main"] == sum(len(record.ids) for record in made)
    views = sum(len(pair.second.content) + 2 for record in made for pair in record.pairs)
    assert result.file["tokens"]["all"] == result.file["tokens"]["main"] + views
    assert result.template["system role"] == "yes"


def test_a_record_too_long_is_shown_truncated_and_the_note_says_so(records: list[Record], tokenizer: Any) -> None:
    config = _config("step-jepa", "branched")
    (full,) = inspect_records(records, 0, tokenizer, config).records
    result = inspect_records(records, 0, tokenizer, replace(config, max_length=full["main_tokens"] - 4))
    (cut,) = result.records
    assert result.config.over_length == "error"
    assert cut["main_tokens"] == full["main_tokens"] - 4
    assert result.file["counts"]["over length"] == result.file["counts"]["truncated"] > 0
    assert f"{full['main_tokens'] - 4} tokens of {full['main_tokens'] - 4} at most" in as_text(result)


def test_what_training_would_refuse_is_said_as_it_would_say_it(records: list[Record], tokenizer: Any) -> None:
    config = _config("step-jepa", "branched")
    assert inspect_records(records, 0, tokenizer, config).refused is None
    (full,) = inspect_records(records, 0, tokenizer, config).records
    short = replace(config, max_length=full["main_tokens"] - 4)
    refused = str(inspect_records(records, 2, tokenizer, short).refused)
    assert refused.startswith(f"sums.jsonl:1: the record has {full['main_tokens']} tokens, more than max_length")
    assert inspect_records(records, 0, tokenizer, replace(short, over_length="truncate")).refused is None
    refused = str(inspect_records(records, 0, tokenizer, replace(config, require_pairs=True)).refused)
    assert refused.startswith("sums.jsonl:4: the record has no usable pair of views")
    unsplit = replace(config, step_separator="##")
    refused = str(inspect_records(records, 0, tokenizer, unsplit).refused)
    with pytest.raises(UserError) as training:
        prepare(records, tokenizer, unsplit)
    assert refused == str(training.value)
    fault = "none of the 3 records has a pair (the last answer has too few steps, its paragraphs are enough (2);"
    assert refused.startswith(f"sums.jsonl: {fault}") and "; set `step_separator blank`, or use" in refused


@pytest.mark.parametrize("options", [{}, {"front_pred": True}, {"reverse_pred": True}], ids=str)
def test_answers_and_the_exchange_that_gives_the_views_are_shown(tokenizer: Any, options: dict[str, Any]) -> None:
    texts = ["Red?", "Red", "More?", "Blue\n\nOne"]
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    record = parse_record({"messages": chat}, "chats.jsonl", 1)
    config = _config("llm-jepa", "separate", predictors=2, **options)
    for pairs in ("first", "all"):
        result = inspect_records([record], 0, tokenizer, replace(config, pairs=pairs))
        exchanges = [texts[:2], texts[2:]][: len(result.records[0]["views"])]
        assert len(exchanges) == result.records[0]["pairs"] == (1 if pairs == "first" else 2)
        sides = ("target", "source") if options.get("reverse_pred") else ("source", "target")
        assert result.records[0]["views"] == [dict(zip(sides, each, strict=True)) for each in exchanges]
        output = as_text(result)
        assert "line 1, answer 1: Red\nline 1, answer 2: Blue⏎⏎One\n" in output
        assert "step 1" not in output
        ends = ("Red", "Red?") if options.get("reverse_pred") else ("Red?", "Red")
        assert f"line 1, pair 1: source {ends[0]} {EDGE} target {ends[1]}" in output
    steps = inspect_records([record], 0, tokenizer, _config("step-jepa", "branched"))
    assert "line 1, step 1: Blue⏎⏎\nline 1, step 2: One\n" in as_text(steps)
    assert steps.records[0]["answers"] == []


def test_records_that_training_leaves_out_are_errors_with_a_remedy(records: list[Record], tokenizer: Any) -> None:
    """Each remedy works: nothing is said of truncation where it leaves no answer, or is asked for already."""
    (full,) = inspect_records(records, 0, tokenizer, _config("regular", "separate")).records
    for options, does in (
        ({"max_length": 5, "over_length": "skip"}, "and no answer in so many: training leaves it out"),
        ({"max_length": 5, "over_length": "truncate"}, "and no answer in so many: training leaves it out"),
        ({"max_length": 5}, "and no answer in so many: training refuses it"),
    ):
        with pytest.raises(UserError, match=rf"sums.jsonl:1: .* max_length 5 {does}; raise `max_length`$"):
            inspect_records(records, 0, tokenizer, _config("regular", "separate", **options))
    config = _config("regular", "separate", max_length=full["main_tokens"] - 1, over_length="skip")
    with pytest.raises(UserError, match="and training leaves it out; raise `max_length`, or pass `over_length trunc"):
        inspect_records(records, 0, tokenizer, config)
    assert inspect_records(records, 0, tokenizer, replace(config, over_length="truncate")).records[0]["line"] == 1


def test_a_record_that_is_left_out_does_not_hide_the_others(records: list[Record], tokenizer: Any) -> None:
    (full,) = inspect_records(records, 0, tokenizer, _config("regular", "separate")).records
    config = _config("regular", "separate", max_length=full["main_tokens"] - 1, over_length="skip")
    result = inspect_records(records, 0, tokenizer, config, count=3)
    assert [record["line"] for record in result.records] == [2, 4]
    (left_out,) = result.left_out
    assert left_out["line"] == 1
    assert "training leaves it out; raise `max_length`, or pass `over_length truncate`" in left_out["reason"]
    assert title(result).startswith("sums.jsonl · line 2, 4 · ")


def _chat(*texts: str) -> Record:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return parse_record({"messages": turns}, "chats.jsonl", 1)


def test_only_what_is_trained_is_shown_as_an_answer(tokenizer: Any) -> None:
    """Not a turn that is skipped, nor what truncation cuts off; every answer where the whole chat is trained."""
    record, config = _chat("Red?", "Red", "More?", "Blue\n\nOne"), _config("regular", "separate")
    first, second = (len(each.prompt) + len(each.answer) for each in _turns(tokenizer, record))
    skipped = inspect_records([record], 0, tokenizer, replace(config, max_length=second - 1, over_length="skip"))
    assert skipped.records[0]["answers"] == [{"name": "answer 1", "text": "Red"}]
    assert skipped.records[0]["untrained"] == ["answer 2"]
    assert "line 1, answer 2: not trained: with its prompt it has too many tokens for max_length" in as_text(skipped)
    for cut in range(first, second):
        short = replace(config, max_length=cut, over_length="truncate")
        result, (made,) = inspect_records([record], 0, tokenizer, short), tiny.tokenized(tokenizer, short, [record])
        trained = [tokenizer.decode(each.answer) for each in shown_turns(made, cut)]
        found = [answer["text"] for answer in result.records[0]["answers"]]
        assert found == [text.removesuffix("<|im_end|>") for text in trained]
        assert result.records[0]["untrained"] == ["answer 2"] * (2 - len(trained))
    steps = _config("step-jepa", "branched", max_length=second - 1, over_length="skip")
    result = inspect_records([record], 0, tokenizer, steps)
    assert (result.records[0]["steps"], result.records[0]["untrained"]) == ([], ["answer 2"])
    for labels in ("all", "reference"):
        (shown,) = inspect_records([record], 0, tokenizer, replace(config, labels=labels)).records
        assert [answer["text"] for answer in shown["answers"]] == ["Red", "Blue\n\nOne"]


def _turns(tokenizer: Any, record: Record) -> list[ShownTurn]:
    (whole,) = tiny.tokenized(tokenizer, _config("regular", "separate"), [record])
    return list(shown_turns(whole, 512))


def test_the_plain_format_without_answers_shows_none(tokenizer: Any) -> None:
    made = copy.deepcopy(tokenizer)
    add_plain_tokens(made)
    config, record = _config("regular", "separate", plain=True), _chat("Red?", "Red", "More?", "Blue")
    for labels, answers in (("all", []), ("reference", ["Blue"]), ("assistant", ["Blue"])):
        result = inspect_records([record], 0, made, replace(config, labels=labels))
        assert [answer["text"] for answer in result.records[0]["answers"]] == answers
        assert NO_TEXT not in as_text(result)


def test_a_custom_layout_may_have_sequences_without_text_and_readouts(tokenizer: Any, tmp_path: Path) -> None:
    def place(record: Any, predictors: Any, reading: Any) -> list[TokenSequence]:
        labels = np.stack([record.labels, record.ids[record.labels + 1]], axis=1)
        return [main_sequence(record), TokenSequence(record.ids[1:], labels - [1, 0]), TokenSequence(record.ids[:0])]

    layouts.layout("bare", modes=("regular",))(place)
    try:
        result = inspect_records([_chat("Red?", "Red")], 0, tokenizer, _config("regular", "bare"))
    finally:
        del layouts.LAYOUTS["bare"]
    assert [(each.name, each.kind) for each in result.sequences] == [
        ("main", "main"),
        ("other 1", "other"),
        ("other 2", "other"),
    ]
    assert {branch.kind for branch in result.branches} == {"main", "other"}
    assert "other: other 1" in as_text(result)
    write_png(result, tmp_path / "bare.png", title(result))


def test_white_space_is_made_visible_and_control_characters_are_escaped() -> None:
    assert visible_text(" a\tb\r\n") == "·a⇥b␍⏎"
    assert visible_text("\x1b[31m\u200b日\U000e0001") == "\\x1b[31m\\u200b日\\U000e0001"


def test_token_text_keeps_the_blank_of_sentence_pieces() -> None:
    pieces = SimpleNamespace(
        decode=lambda ids, **_: {0: "word", 1: "", 2: " ", 3: "  kept"}[ids[0]],
        convert_ids_to_tokens=lambda index: {0: "\u2581word", 1: "<odd>", 2: "\u2581\u2581", 3: "\u2581\u2581kept"}[
            index
        ],
    )
    assert [token_text(pieces, index) for index in range(4)] == [" word", "<odd>", "  ", "  kept"]


def test_the_tree_as_text(records: list[Record], tokenizer: Any) -> None:
    result = inspect_records(records, 0, tokenizer, _config("step-jepa", "branched", pairs="all"), count=2)
    text = as_text(result)
    words = " ".join(text.split())
    assert all(each in words for each in ("source 1", "step 2: 7+5=12⏎⏎", "begin of text", "tokens over regular", "⇥"))
    assert f"<|predictor_1|>{EDGE}<|predictor_2|>{READ}" in map(str.strip, text.splitlines())


def test_labels_of_several_records_at_one_position_are_counted(tokenizer: Any) -> None:
    same = [_record("Red", line) for line in (1, 2)]
    result = inspect_records(same, 0, tokenizer, _config("regular", "separate"), count=2)
    assert [branch.kind for branch in result.branches] == ["shared"]
    assert all(len(token.labels) in (0, 2) for token in result.tokens)
    assert "<|im_end|> ×2" in as_text(result)


def test_tokens_whose_states_are_averaged_are_counted_in_the_text(records: list[Record], tokenizer: Any) -> None:
    config = _config("llm-jepa", "separate", predictors=3, pooling="mean")
    result = inspect_records(records, 1, tokenizer, config)
    (target,) = (token for token in result.tokens if any(name.startswith("target") for name in token.readouts))
    (pair,) = tiny.tokenized(tokenizer, config, records)[1].pairs
    assert target.averaged == [len(pair.second.content)]
    text = as_text(result)
    assert f"<|predictor_3|>{READ}[mean of 3 tokens]" in text
    assert f"{READ}[mean of {len(pair.second.content)} tokens]" in text
    assert "mean of" not in as_text(inspect_records(records, 1, tokenizer, replace(config, pooling="last")))


def test_several_texts_of_a_record_are_told_apart(tokenizer: Any) -> None:
    """A template that rewrites earlier turns; the limit is one of each text, not of their sum."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = chat_templates.THINKING
    chat = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(["Red?", "Red", "So?", "No"])
    ]
    record = parse_record({"messages": chat}, "chats.jsonl", 1)
    config = _config("regular", "separate", max_length=60)
    result = inspect_records([record], 0, made, config)
    lengths = [len(text.ids) for text in tiny.tokenized(made, config, [record])[0].texts]
    assert [each.name for each in result.sequences] == ["main 1", "main 2"]
    assert result.records[0]["main_texts"] == lengths
    shown = f"{sum(lengths)} tokens in 2 texts, {max(lengths)} of 60 at most in one"
    assert f"line 1: 0 pairs of views; {shown}\n" in as_text(result)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["branched", "inplace"])
def test_the_picture_is_a_png(records: list[Record], tokenizer: Any, tmp_path: Path, layout: str) -> None:
    # Dollar signs would be mathematics, and the font has no glyph for every script: both must pass without a warning.
    result = inspect_records(records, 0, tokenizer, _config("step-jepa", layout, pairs="all", predictors=1), count=2)
    write_png(result, tmp_path / "record.png", title(result))
    content = (tmp_path / "record.png").read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    assert len(content) > 10_000
