"""What a ``Jepa`` says of wrong arguments: the argument, what is expected and what was passed; nothing is ignored."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepjepa import Jepa, JepaConfig, effective_rank, fit_linear_map, load_for_inference, read_records
from stepjepa.base.errors import UserError
from stepjepa.objectives.inputs import _OTHER_NAMES, EmbedOptions
from tiny import make_model, make_record

RECORD = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]}


@pytest.fixture(scope="module")
def jepa(trained_tokenizer: Any) -> Jepa:
    return Jepa(make_model("llama"), copy.deepcopy(trained_tokenizer), JepaConfig())


Call = Callable[[Any], object]
fit: Any = fit_linear_map
rank: Any = effective_rank
read: Any = read_records
load: Any = load_for_inference
CASES: list[tuple[Call, type[Exception], str]] = [
    # Texts and records.
    (lambda jepa: jepa.embed(None), TypeError, "inputs: expected a list of texts or of records, got None"),
    (lambda jepa: jepa.embed(3), TypeError, "inputs: expected a list of texts or of records, got int"),
    (lambda jepa: jepa.embed(Path("a")), TypeError, "inputs: expected .*, got PosixPath"),
    (lambda jepa: jepa.embed(b"a"), TypeError, "inputs: expected .*, got bytes"),
    (lambda jepa: jepa.embed(RECORD), UserError, "got an object with the keys messages; put a record by itself"),
    (lambda jepa: jepa.embed(make_record("a", "b", "c")), ValueError, "inputs: .* got one record; put it into a list"),
    (lambda jepa: jepa.embed_pairs("a.jsonl"), UserError, r"stepjepa.read_records\(path\) reads those of a file"),
    (lambda jepa: jepa.embed_pairs(make_record("a", "b", "c")), UserError, "put a record by itself into a list"),
    # Options.
    (lambda jepa: jepa.embed(["a"], batch_size=0), ValueError, "batch_size: expected 1 or more, got 0"),
    (lambda jepa: jepa.embed(["a"], batch_size="4"), TypeError, "batch_size: expected a whole number, got '4'"),
    (lambda jepa: jepa.embed(["a"], layer="1"), TypeError, "layer: expected a whole number, got '1'"),
    (lambda jepa: jepa.embed(["a"], linear_map="f"), TypeError, r"linear_map: .* stepjepa.fit_linear_map.*, got str"),
    (lambda jepa: jepa.embed(["a"], "sources"), ValueError, "side: expected 'source' or 'target', got 'sources'"),
    (lambda jepa: jepa.embed_pairs([RECORD], batch_size=-1), ValueError, "batch_size: expected 1 or more, got -1"),
    (lambda jepa: jepa.pair_embedder().at([RECORD], []), ValueError, "places: expected at least one .*, got none"),
    (lambda jepa: jepa.pair_embedder().at([RECORD], [(99, "last")]), ValueError, "layer: expected .*, got 99"),
    (lambda jepa: jepa.pair_embedder().at([RECORD], [(1, "cls")]), ValueError, "pooling: expected .*, got 'cls'"),
    # Search.
    (lambda jepa: jepa.index(["a"]).search("a"), ValueError, "got one text; put it into a list"),
    (lambda jepa: jepa.index(["a"]).search(["a"], k=0), ValueError, "k: expected 1 or more, got 0"),
    (lambda jepa: jepa.index(["a"]).search(["a"], k=None), TypeError, "k: expected a whole number, got None"),
    # Questions.
    (lambda jepa: jepa.answer(None), TypeError, "question: expected a text, messages or a record, got None"),
    (lambda jepa: jepa.answer(b"a"), TypeError, "question: expected .*, got bytes"),
    (lambda jepa: jepa.answers(None), TypeError, "questions: expected a list of questions, got None"),
    (lambda jepa: jepa.answers(["a"], batch_size=0), ValueError, "batch_size: expected 1 or more, got 0"),
    (lambda jepa: jepa.answer("a", max_new_tokens=None), ValueError, "max_new_tokens: expected .*, got None"),
    # Batches.
    (lambda jepa: jepa.counts([]), ValueError, "batches: expected at least one batch, got none"),
    (lambda jepa: jepa.counts(jepa.collate([RECORD])), TypeError, "batches: .* got Batch; put one by itself into a"),
    (lambda jepa: jepa.counts([RECORD]), TypeError, r"batches: expected those of jepa.collate\(records\), got dict"),
    (
        lambda jepa: jepa.loss(jepa.model, jepa.collate([RECORD]), {"lm_loss": 3.0}),
        ValueError,
        r"counts: expected those of lm_loss, jepa_loss, as counts\(batches\) gives them, got lm_loss",
    ),
    (lambda jepa: jepa.loss(jepa.model, jepa.collate([RECORD]), {}), ValueError, "counts: .* got none"),
    (lambda jepa: jepa.loss(torch.nn.Linear(2, 3), jepa.collate([RECORD])), ValueError, "a decoder, got Linear"),
    # Paths.
    (lambda jepa: type(jepa).from_pretrained(None), TypeError, "path: expected a run folder, .*, got None"),
    (load, TypeError, "path: expected a run folder, .*, got Jepa"),
    (lambda jepa: jepa.save(__file__), UserError, "is a file; name a folder"),
    # Functions beside it.
    (lambda jepa: fit("runs/a", []), TypeError, r"jepa: expected Jepa.from_pretrained\(path\) .*, got str"),
    (lambda jepa: rank(np.eye(3)), TypeError, r"embeddings: expected a tensor \[P, D\], got ndarray"),
    (lambda jepa: rank(torch.ones(3)), ValueError, r"embeddings: expected a tensor \[P, D\], got \[3\]"),
    (lambda jepa: read(__file__, limit=0), ValueError, "limit: expected 1 or more, got 0"),
    (lambda jepa: read(__file__, bad="skip"), TypeError, r"bad: expected BadRecords\('skip'\) .*, got str"),
]


@pytest.mark.parametrize(("call", "kind", "message"), CASES)
def test_a_wrong_argument_is_named(call: Call, kind: type[Exception], message: str, jepa: Any) -> None:
    """Several ended in an error of Python's own from deep inside; a dict was embedded as the name of its key."""
    with pytest.raises(kind, match=message):
        call(jepa)


def test_an_option_that_there_is_not_is_refused(jepa: Any) -> None:
    """It was ignored, so that what a user had asked for was silently not done."""
    with pytest.raises(TypeError, match=r"no option 'poolin' to embed; did you mean pooling\?"):
        jepa.embed(["a"], poolin="mean")
    with pytest.raises(TypeError, match="no option 'rubbish' to embed; there are batch_size, raw, layer"):
        jepa.index(["a"], rubbish=1)
    for name, remedy in _OTHER_NAMES.items():
        assert name not in EmbedOptions.__annotations__
        with pytest.raises(TypeError, match=re.escape(f"no option '{name}' to embed; {remedy}")):
            jepa.embedder("target", **{name: 1})


def test_methods_of_other_libraries_are_answered_by_ours(jepa: Jepa) -> None:
    for name, remedy in Jepa.elsewhere.items():
        assert not hasattr(jepa, name)
        with pytest.raises(AttributeError) as caught:
            getattr(jepa, name)
        assert str(caught.value) == f"Jepa has no attribute '{name}'; {remedy}"
    with pytest.raises(AttributeError, match=r"^'Jepa' object has no attribute 'rubbish'$"):
        getattr(jepa, "rubbish")  # noqa: B009  # a type checker knows that there is none


def test_the_error_of_a_property_stays(jepa: Jepa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jepa, "_provenance", None)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'settings'"):
        _ = jepa.has_objective


def test_rows_of_dicts_and_plain_places_do(jepa: Any) -> None:
    embedder = jepa.pair_embedder()
    (by_place,) = embedder.at((row for row in [RECORD]), [(1, "last")]).items()
    assert (by_place[0].layer, by_place[1].source.shape[0]) == (1, 1)
    batch = jepa.collate([RECORD])
    assert jepa.counts(batch for batch in [batch, batch]) == jepa.counts([batch, batch])
    assert len(jepa.index(["a", "b", "a"])) == 2


def test_it_is_copied(jepa: Jepa) -> None:
    """Its compiled template could not be copied; a pickle of it gives the template alone."""
    other = copy.deepcopy(jepa)
    assert other.model is not jepa.model
    np.testing.assert_array_equal(other.embed(["one", "two"]), jepa.embed(["one", "two"]))
    template = jepa.record_tokenizer.template
    assert pickle.loads(pickle.dumps(template)).prompt(RECORD["messages"]) == template.prompt(RECORD["messages"])
