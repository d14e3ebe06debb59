"""Embeddings of bare texts against a plain pass of each text alone, and search against a sort of all cosines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from stepjepa import Jepa, JepaConfig, Record
from stepjepa.base.errors import UserError
from stepjepa.objectives import index as index_module
from stepjepa.objectives.embedding import Text
from stepjepa.objectives.index import nearest
from stepjepa.objectives.reading import micro_batches
from stepjepa.views.sequences import TokenSequence
from tiny import make_model, make_record

SYSTEM = "Add, please, and write down all that you do on the way to the sum."
TEXTS = [
    "What is 3+4+5?",
    "What is 3+4+5+6?",
    "Name a colour",
    "What is 3+4+5?",
    "Once more: 1+1",
    "What is 3",
    " padded with blanks ",
]


def plain_vectors(model: Any, tokenizer: Any, texts: list[str]) -> np.ndarray:
    """The hidden state of the last token of each text, from a pass for each, divided by its length."""
    vectors = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            state = model.eval()(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        vectors.append((state / state.norm()).numpy())
    return np.stack(vectors)


def header(tokenizer: Any, role: str, content: str, system: str | None = None) -> str:
    """A message in the tests' template, behind a system message if there is one, up to the end of its content."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    text: str = tokenizer.apply_chat_template([*messages, {"role": role, "content": content}], tokenize=False)
    return text[: text.rindex(content) + len(content)]


@pytest.mark.sample(7)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", ["separate", "branched"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_text_is_one_plain_pass(
    architecture: str, layout: str, reverse: bool, side: Any, tiny_tokenizer: Any
) -> None:
    config = JepaConfig(layout=layout, predictors=3, reverse_pred=reverse, max_length=211)
    jepa = Jepa(make_model(architecture), tiny_tokenizer, config)
    jepa.system_prompt = SYSTEM
    predictors = "".join(f"<|predictor_{number}|>" for number in (1, 2, 3)) if side == "source" else ""
    is_question = (side == "source") != reverse
    system = SYSTEM if is_question and layout == "branched" else None
    role = "user" if is_question else "assistant"
    expected = [header(tiny_tokenizer, role, text, system) + predictors for text in TEXTS]
    vectors = jepa.embed(TEXTS, side)
    assert (vectors.dtype, vectors.shape) == (np.float32, (7, jepa.model.config.hidden_size))
    np.testing.assert_allclose(vectors, plain_vectors(jepa.model, tiny_tokenizer, expected), atol=2e-6)
    # The same view out of a record, which holds both.
    pairs = [(text, ".") if is_question else (".", text) for text in TEXTS]
    records = [make_record(SYSTEM, *pair) for pair in pairs]
    np.testing.assert_allclose(jepa.embed(records, side), vectors, atol=2e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_batches_change_no_value(batch_size: int, tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(layout="branched", predictors=2))
    jepa.system_prompt = SYSTEM
    many = [f"{text} {number}" for number in range(5) for text in TEXTS]
    np.testing.assert_allclose(jepa.embed(many, batch_size=batch_size), jepa.embed(many, batch_size=7), atol=1e-6)
    # In blocks as in one call, whatever else is in a block.
    embedder = jepa.embedder("source", batch_size=batch_size)
    blocks = [embedder(many[start : start + 11]).vectors for start in range(0, len(many), 11)]
    np.testing.assert_allclose(np.concatenate(blocks), jepa.embed(many), atol=1e-6)


def tokens_run(jepa: Jepa, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the tokens of each micro-batch that the model runs."""
    from stepjepa.objectives import reading

    counted: list[int] = []
    encode = reading.encode

    def counting(model: Any, batch: Any, *args: Any, **options: Any) -> Any:
        counted.append(batch.num_tokens)
        return encode(model, batch, *args, **options)

    monkeypatch.setattr(reading, "encode", counting)
    return counted


def test_equal_texts_and_shared_beginnings_are_computed_once(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(layout="branched", predictors=1))
    jepa.system_prompt = SYSTEM
    counted = tokens_run(jepa, monkeypatch)
    one = jepa.embed(["Name a colour"])
    alone = sum(counted)
    equal = jepa.embed(["Name a colour"] * 13, batch_size=2)
    assert sum(counted) == 2 * alone
    np.testing.assert_array_equal(equal, np.repeat(one, 13, 0))
    counted.clear()
    jepa.embed([f"Name {number} colours" for number in range(8)])
    own = len(tiny_tokenizer("Name 7 colours<|predictor_1|>", add_special_tokens=False).input_ids)
    assert sum(counted) <= alone + 8 * own


def test_what_shares_most_tokens_is_a_micro_batch_and_the_rest_goes_by_length() -> None:
    shared = [*range(100, 117)]
    ids = [[1, 2, 3], [*shared, 9], [4] * 5, [*shared, 7, 7], [5] * 30, [*shared, 8]]
    sequences = [TokenSequence(np.array(each, np.int32)) for each in ids]
    batches = micro_batches(sequences, 2)
    assert [sorted(batch.indices) if batch.shares else batch.indices for batch in batches] == [[4, 2], [3, 5], [1], [0]]
    assert [batch.shares for batch in batches] == [False, True, True, False]


@pytest.mark.parametrize("predictors", [0, 2])
def test_a_step_alone_is_closed_by_its_separator(predictors: int, tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(mode="step-jepa", predictors=predictors))
    expected = plain_vectors(jepa.model, tiny_tokenizer, ["3+4=7.\n\n", "So it is\n\n"])
    np.testing.assert_allclose(jepa.embed(["3+4=7.", "So it is\n\n"], "target"), expected, atol=2e-6)
    with pytest.raises(UserError, match=r"<memory>:1: a source view of step-jepa is a step behind its chat"):
        jepa.embed(["3+4=7."])


def test_a_chat_may_end_with_the_question_that_is_embedded(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(layout="branched", predictors=2))
    turns = [("user", "Hm"), ("assistant", "So"), ("user", "What?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = jepa.embed_steps([{"messages": messages[:1]}, {"messages": messages}])
    assert (rows.index.tolist(), rows.step.tolist()) == ([0, 1, 1], [1, 1, 2])
    text = tiny_tokenizer.apply_chat_template(messages, tokenize=False)
    text = text[: text.rindex("What?") + 5] + "<|predictor_1|><|predictor_2|>"
    np.testing.assert_allclose(rows.vectors[2:], plain_vectors(jepa.model, tiny_tokenizer, [text]), atol=2e-6)
    np.testing.assert_allclose(rows.vectors[:2], np.repeat(jepa.embed(["Hm"]), 2, 0), atol=2e-6)
    with pytest.raises(UserError, match=r"<memory>:1: .*assistant"):
        jepa.embed([{"messages": messages[:1]}], "target")


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({}, {}, r"<memory>:2: the text is empty; leave it out"),
        ({}, {}, r"<memory>:2: the text holds half of a character \(a lone surrogate\); remove it"),
        (
            {"max_length": 11},
            {},
            r"<memory>:1: the text has \d+ tokens, more than max_length 11; .* raise `max_length`",
        ),
        ({}, {"max_length": 17}, r"<memory>:1: the text has \d+ tokens, more than max_length 17"),
        ({"max_length": 999}, {}, r"<memory>:3: the text has \d+ tokens, and the model has 509 positions; shorten it"),
    ],
)
def test_a_text_that_can_not_be_embedded_is_named(
    changes: dict[str, Any], options: Any, told: str, tiny_tokenizer: Any
) -> None:
    texts = ["What is three and four and five and six?", "  ", "long " * 600]
    texts = texts if "empty" in told else [texts[0], "Why\ud83d?" if "half" in told else "Why?", texts[2]]
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(**changes))
    with pytest.raises(UserError, match=told):
        jepa.embed(texts, **options)


def test_what_is_no_list_of_texts_is_refused(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig())
    with pytest.raises(ValueError, match="inputs: expected a list of texts or of records, got one text"):
        jepa.embed("Why?")
    with pytest.raises(ValueError, match="inputs: expected texts alone or records alone, got no text at index 1"):
        jepa.embed(["Why?", {"messages": []}])
    with pytest.raises(UserError, match="expected an object with the fields of a record, got 'None'"):
        jepa.embed([None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="layer: expected -3 to 2 for a model of 2 layers, got 7"):
        jepa.embed(["Why?"], layer=7)


def test_columns_and_rows_of_data_frames_are_texts_and_records(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig())
    frame = pd.DataFrame({"question": TEXTS[:3], "answer": ["12", "18", "Red"]})
    expected = jepa.embed(TEXTS[:3])
    for inputs in (frame["question"], np.array(TEXTS[:3]), iter(TEXTS[:3]), frame, [Text(text) for text in TEXTS[:3]]):
        np.testing.assert_allclose(jepa.embed(inputs), expected, atol=2e-6)


def test_several_system_prompts_of_training_need_a_choice(tiny_tokenizer: Any, tmp_path: Path) -> None:
    config = JepaConfig(layout="branched", predictors=1)
    jepa = Jepa(make_model("llama"), tiny_tokenizer, config)
    jepa._provenance = replace(jepa._provenance, system_prompts=["Add.", None])
    with pytest.raises(UserError, match=r"several system prompts \('Add.', none\); choose one"):
        jepa.embed(["Why?"])
    jepa.embed(["Why?"], "target")
    chosen = []
    for prompt, system in (("Add.", "Add."), ("", None)):
        jepa.system_prompt = prompt
        chosen.append(jepa.embed(["Why?"]))
        expected = [header(tiny_tokenizer, "user", "Why?", system) + "<|predictor_1|>"]
        np.testing.assert_allclose(chosen[-1], plain_vectors(jepa.model, tiny_tokenizer, expected), atol=2e-6)
    assert np.abs(chosen[0] - chosen[1]).max() > 1e-3


def test_a_run_folder_embeds_behind_the_system_prompt_of_its_training(tiny_tokenizer: Any, tmp_path: Path) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(layout="branched", predictors=1))
    jepa.system_prompt = "Add."
    jepa.save(tmp_path)
    again = Jepa.from_pretrained(tmp_path, device="cpu")
    np.testing.assert_allclose(again.embed(TEXTS), jepa.embed(TEXTS), atol=2e-6)


@pytest.mark.parametrize("block", [3, 7, 1000])
def test_search_is_a_sort_of_all_products(block: int) -> None:
    draw = np.random.default_rng(5)
    queries, vectors = (draw.standard_normal((count, 13)).astype(np.float32) for count in (11, 101))
    scores, indices = nearest(queries, vectors, 5, block=block)
    products = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    expected = np.argsort(-products, axis=1)[:, :5]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(scores, np.take_along_axis(products, expected, 1), rtol=1e-4)
    assert nearest(queries, vectors[:2], 5)[1].shape == (11, 2)
    with pytest.raises(ValueError, match="k: expected 1 or more, got 0"):
        nearest(queries, vectors, 0)


@pytest.mark.parametrize("block", [3, 7, 1000])
def test_of_equally_near_texts_the_first_are_found(block: int) -> None:
    vectors = np.ones((101, 13), np.float32)
    vectors[[5, 17, 90]] = 2
    queries = np.ones((2, 13), np.float32)
    queries[1] = 0
    scores, indices = nearest(queries, vectors, 7, block=block)
    assert indices.tolist() == [[5, 17, 90, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert scores.tolist() == [[26.0] * 3 + [13.0] * 4, [0.0] * 7]


def test_an_index_finds_distinct_texts(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "BLOCK", 2)
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(predictors=2))
    corpus = ["12", "Red", "12", "two", "So it is"]
    hits = jepa.index(corpus, batch_size=3).search(["Name a colour", "What is 3+4+5?"], k=3)
    cosines = jepa.embed(["Name a colour", "What is 3+4+5?"]) @ jepa.embed(corpus, "target").T
    for row, own in zip(hits, cosines, strict=True):
        order = [place for place in np.argsort(-own, kind="stable") if place != 2][:3]
        assert [hit.index for hit in row] == order
        assert [hit.text for hit in row] == [corpus[place] for place in order]
        np.testing.assert_allclose([hit.score for hit in row], own[order], atol=2e-6)
    # Answers as queries, questions as corpus.
    other = jepa.index(TEXTS, side="source").search(["Red"], k=1)
    assert other[0][0].score == pytest.approx(
        float((jepa.embed(TEXTS) @ jepa.embed(["Red"], "target").T).max()), abs=1e-5
    )
    record = Record(messages=({"role": "user", "content": "Hm"}, {"role": "assistant", "content": "So"}))
    with pytest.raises(ValueError, match="texts: expected a list of texts to be found, got records"):
        jepa.index([record])
    with pytest.raises(ValueError, match="raw: an index compares by cosine"):
        jepa.index(corpus, raw=True)


def test_plain_formats_are_embedded_without_a_template(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(plain=True, predictors=1, layout="branched"))
    questions = plain_vectors(jepa.model, tiny_tokenizer, [f"{text}<|predictor_1|>" for text in TEXTS])
    np.testing.assert_allclose(jepa.embed(TEXTS), questions, atol=2e-6)
    np.testing.assert_allclose(jepa.embed(TEXTS, "target"), plain_vectors(jepa.model, tiny_tokenizer, TEXTS), atol=2e-6)
