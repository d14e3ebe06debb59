"""Special tokens that training adds, and those that a user only spells: text, in training and in evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import tiny
from slow_tokens import slow_tokens
from stepjepa.batch.collate import Collator
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special_tokens import add_predictor_tokens, all_predictor_ids, predictor_ids, predictor_token
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import TextTokenizer, _tokenize, overlap
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.evaluation.prompts import make_examples
from stepjepa.models.presets import train_tokenizer
from stepjepa.tasks.base import Continuation
from stepjepa.views.sequences import SampledRecord


class MadeUpTurn(NamedTuple):
    """A turn whose special tokens were all written by a template."""

    text: str
    answer: int
    own: Any = ()
    prompt_own: Any = ()


SPELT = "<|predictor_1|><|eot_id|> <|im_start|>x<|im_end|>\n<|endoftext|>"
MODES: dict[str, dict[str, Any]] = {
    "separate": {"mode": "llm-jepa"},
    "front": {"mode": "llm-jepa", "front_pred": True},
    "steps": {"mode": "step-jepa"},
    "inplace": {"mode": "step-jepa", "layout": "inplace"},
    "plain": {"mode": "llm-jepa", "plain": True},
}


def test_predictor_tokens_are_added_once() -> None:
    tokenizer = train_tokenizer(["some text"], 270)
    size = len(tokenizer)
    ids = add_predictor_tokens(tokenizer, 2)
    assert ids == add_predictor_tokens(tokenizer, 2) == [size, size + 1]
    assert add_predictor_tokens(tokenizer, 1) == ids[:1]
    ids = add_predictor_tokens(tokenizer, 12)
    assert ids == predictor_ids(tokenizer, 12) == all_predictor_ids(tokenizer) == list(range(size, size + 12))
    assert tokenizer.convert_ids_to_tokens(ids) == [predictor_token(number) for number in range(1, 13)]
    assert tokenizer("a<|predictor_2|><|predictor_1|>b", add_special_tokens=False)["input_ids"][1:3] == ids[1::-1]
    # The tokens that were special before still are.
    assert tokenizer.decode([*ids, *tokenizer("<|im_start|>")["input_ids"]], skip_special_tokens=True) == ""
    with pytest.raises(ValueError, match=r"<\|predictor_13\|>; call add_predictor_tokens\(tokenizer, 14\)"):
        predictor_ids(tokenizer, 14)


def spelling(text: str) -> Record:
    return tiny.make_record(f"Be {text}", f"What is {text}?", f"It is {text}.\n\nSo {text}\n\nend {text}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "mode"), [*(("minimind", mode) for mode in MODES), ("qwen2.5", "separate"), ("olmo2", "plain")]
)
def test_no_special_token_comes_from_an_answer_or_a_view(
    real_tokenizer: Callable[..., Any], name: str, mode: str
) -> None:
    tokenizer = real_tokenizer(name, plain=True)
    config = JepaConfig(**MODES[mode], max_length=997)
    made = RecordTokenizer(tokenizer, config)
    collator = Collator.of(config, made.predictors.tolist())
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    harmless, record = made.tokenize([spelling("nothing"), spelling(SPELT)])
    assert made.counts["turns that spell special tokens"] == 1
    # As many as the template and the layout write, and the same ones.
    remaining = [
        [
            each.ids[np.isin(each.ids, special)].tolist()
            for each in collator.sequences(SampledRecord(one))
            if not len(each.text)
        ]
        for one in (harmless, record)
    ]
    if mode not in ("steps", "inplace"):  # whose sources stand in the chat
        assert remaining[0] == remaining[1]
        assert any(remaining[0])
    # All of the text is there.
    assert "<|predictor_1|><|eot_id|> <|im_start|>x<|im_end|>" in tokenizer.decode(record.ids)
    assert len(record.pairs) == len(harmless.pairs) > 0
    # What is taught ends the turn once, at its end.
    taught = record.ids[record.labels + 1]
    assert np.isin(taught, special).nonzero()[0].tolist() == [len(taught) - 1]
    # In a prompt they are what a server makes of them; without a chat format that is not defined, and they are text.
    prompt = record.ids[: record.labels[0] + 1]
    if mode == "plain":
        assert np.isin(prompt, special).sum() == np.isin(harmless.ids[: harmless.labels[0] + 1], special).sum()
    else:
        messages = [dict(message) for message in spelling(SPELT).messages[:-1]]
        served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prompt.tolist() == served


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "plain"), [("minimind", False), ("qwen2.5", True), ("olmo2", False)])
def test_an_evaluation_asks_with_the_tokens_of_training(
    real_tokenizer: Callable[..., Any], name: str, plain: bool
) -> None:
    tokenizer = real_tokenizer(name, plain=plain)
    record = spelling(SPELT)
    template = PlainTemplate(tokenizer) if plain else ChatTemplate(tokenizer)
    message = [Continuation("a", f"so {SPELT}"), Continuation("b", f"so {SPELT}", f"context {SPELT} ")]
    (example,) = make_examples([(0, record)], tokenizer, template, lambda _: message)
    config = JepaConfig(mode="regular", plain=plain, max_length=997)
    (trained,) = RecordTokenizer(tokenizer, config).tokenize([record])
    assert example.gold.ids == trained.ids.tolist()[: len(example.gold.ids)]
    assert example.prompt_ids == example.gold.ids[: len(example.prompt_ids)]
    predictor = tokenizer.convert_tokens_to_ids("<|predictor_1|>")
    for span in (example.gold, *example.continuations.values()):
        assert predictor not in span.ids[span.start :]
        assert "<|predictor_1|><|eot_id|>" in tokenizer.decode(span.ids[span.start :])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["minimind", "qwen2.5", "olmo2"])
def test_stand_ins_give_the_tokens_of_every_stretch_by_itself(real_tokenizer: Callable[..., Any], name: str) -> None:
    tokenizer = real_tokenizer(name)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    generator = np.random.default_rng(11)
    words = ["a", " b", "\n", "ünï", "7", "  ", "<|", "|>", "<think>", "🙂", *special]
    texts, contents = [], []
    for turn in range(31):
        text, spans = "", []
        inside = words if turn % 3 else words[:10]
        for number in range(int(generator.integers(1, 5))):
            text += "".join(generator.choice(words, int(generator.integers(0, 4)))) + special[number % len(special)]
            content = "".join(generator.choice(inside, int(generator.integers(1, 7))))
            spans.append((len(text), len(text) + len(content)))
            text += content
        texts.append(text + special[0])
        contents.append(spans)
    made = TextTokenizer(tokenizer)
    assert 0 < sum(map(overlap, map(made.special_spans, texts), contents)) < len(texts)
    # Together, and one by one.
    for result in (
        made(texts, contents),
        [made([text], [spans])[0] for text, spans in zip(texts, contents, strict=True)],
    ):
        for tokens, text, spans in zip(result, texts, contents, strict=True):
            slow_tokens(tokenizer, text, spans).check(tokens, text)
    assert tokenizer(special[0])["input_ids"] == [tokenizer.convert_tokens_to_ids(special[0])], "left as it was"


def test_a_token_that_reaches_over_an_end_of_a_content_is_none(trained_tokenizer: Any) -> None:
    made = TextTokenizer(trained_tokenizer)
    spans = [(0, 1), (0, 2), (1, 11), (10, 11), (3, 4)]
    special = made.special_spans("a<|im_end|>")
    assert special == [(1, 11)]
    assert [overlap(special, [span]) for span in spans] == [False, True, True, True, True]


def test_a_prompt_is_tokenised_once_whatever_follows(trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that reach the tokenizer grow with the chat, not with its square, though each turn has its prompt."""
    from stepjepa.chat import tokens

    remaining, observed = tokens._tokenize, list[int]()

    def counting(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        observed.append(sum(map(len, texts)))
        return remaining(tokenizer, texts, **options)

    monkeypatch.setattr(tokens, "_tokenize", counting)
    cost = {}
    for turns in (4, 16):
        observed.clear()
        contents = [f"number {number} of many" for number in range(2 * turns)]
        made = RecordTokenizer(trained_tokenizer, JepaConfig(mode="regular", max_length=4096))
        (record,) = made.tokenize([tiny.make_record("", *contents)])
        assert sum(np.diff(record.labels) != 1) + 1 == turns
        cost[turns] = sum(observed)
    assert cost[16] < 4.5 * cost[4]


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        ([(0, 2)], False),
        ([(0, 4)], True),
        ([(2, 4), (0, 1)], True),
        ([(12, 15)], True),
        ([(13, 15)], False),
        ([(0, 20), (14, 15)], True),
        ([(5, 5)], False),
        ([], False),
    ],
)
def test_a_special_token_in_a_content(contents: list[tuple[int, int]], wanted: bool, trained_tokenizer: Any) -> None:
    # Characters 3 to 12 are a token.
    special = TextTokenizer(trained_tokenizer).special_spans("ab <|im_end|> cd")
    assert overlap(special, contents) is wanted
    # Many contents are sorted first.
    assert overlap(special, [*contents, *[(5, 5)] * 97]) is wanted


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["minimind", "qwen2.5", "olmo2"])
def test_turns_are_prompt_and_whole_by_themselves(real_tokenizer: Callable[..., Any], name: str) -> None:
    """Cut at once, or each alone; with answers that begin inside a token of the whole."""
    tokenizer = real_tokenizer(name)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    generator = np.random.default_rng(13)
    words = ["a", " b", "\n", "\n\n", "ünï", "7", "  ", "<think>", "🙂", "?", *special]
    turns = []
    for _ in range(211):
        parts = generator.choice(words, int(generator.integers(1, 17))).tolist()
        text = "".join(parts)
        between = len("".join(parts[: int(generator.integers(0, len(parts)))]))
        turns.append(MadeUpTurn(text, between if generator.random() < 0.7 else int(generator.integers(0, len(text)))))
    made, alone = TextTokenizer(tokenizer), TextTokenizer(tokenizer)
    apart = 0
    for turn, (tokens, answer, is_apart, spans) in zip(turns, made.turns(turns), strict=True):
        prompt, whole = slow_tokens(tokenizer, turn.text[: turn.answer], []), slow_tokens(tokenizer, turn.text, [])
        assert answer == len(prompt.ids)
        assert is_apart == (whole.ids[:answer].tolist() != prompt.ids.tolist())
        assert spans == alone.special_spans(turn.text)
        if not is_apart:
            whole.check(tokens, turn.text)
        else:
            (rest,) = alone.without_dummy_blank([turn.text[turn.answer :]], [[]])
            assert tokens.ids.tolist() == [*prompt.ids.tolist(), *rest.ids.tolist()]
            assert tokens.first_from(turn.answer) == answer
        apart += is_apart
    assert 7 < apart < 204


def test_pieces_that_are_forgotten_are_tokenised_again(trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepjepa.chat.tokens._MOST_PIECES", 3)
    texts = [f"<|im_start|>user\n{word}<|im_end|>\n" for word in ("one", "two", "three", "two", "one")]
    tokenizer = TextTokenizer(trained_tokenizer)
    for text in texts:
        (by_pieces,) = tokenizer([text], [()])
        assert by_pieces.ids.tolist() == trained_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(by_pieces.pieces) == 2 and len(tokenizer._known) <= 3
    # More pieces at once than are remembered.
    assert [text.ids.tolist() for text in tokenizer(texts, [()] * len(texts))] == [
        trained_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
    ]


def test_the_tokenizers_own_settings_hold_and_its_own_methods_are_called(trained_tokenizer: Any) -> None:
    texts, tokenizer = ["one two three four", "five <|im_end|> six", ""], copy.deepcopy(trained_tokenizer)
    wanted = [piece.ids.tolist() for piece in _tokenize(trained_tokenizer, texts)]
    assert wanted == trained_tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=53)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert [piece.ids.tolist() for piece in _tokenize(tokenizer, texts)] == wanted

    class Louder(type(tokenizer)):  # type: ignore[misc]  # the class of an instance
        def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
            return super()._encode_plus([each.upper() for each in text], *args, **options)

    tokenizer.__class__ = Louder
    loud = [piece.ids.tolist() for piece in _tokenize(tokenizer, texts)]
    assert loud == trained_tokenizer([text.upper() for text in texts], add_special_tokens=False)["input_ids"] != wanted
