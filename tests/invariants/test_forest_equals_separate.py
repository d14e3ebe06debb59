"""Invariant 1: one pass over a forest gives what separate passes over its segments give, for every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models import pieces
from stepjepa.models.architecture import choose_encoding
from stepjepa.models.attention import EAGER, SDPA, enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.objectives.objective import Objective

ModelFactory = Callable[..., Any]

CONFIGURATIONS = {
    "step branched": JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    "llm separate": JepaConfig(mode="llm-jepa", layout="separate", predictors=1),
    "llm branched": JepaConfig(mode="llm-jepa", layout="branched", predictors=1),
}
MODELS = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name in tiny.ATTENTION_ONLY
    for attention in ("eager", "sdpa", "pieces")
    if not (name == "gemma2_window" and attention != "eager")  # transformers refuses it: soft cap
]


@pytest.fixture(autouse=True)
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows here are so short that they would never be cut into pieces."""
    if "attention" in request.fixturenames and request.getfixturevalue("attention") == "pieces":
        monkeypatch.setattr(pieces, "CALL_COST", -(10**9))


@pytest.fixture
def tiny_model() -> ModelFactory:
    """Pieces are a way of sdpa."""

    def make(name: str, attention: str = "sdpa", **settings: Any) -> Any:
        return tiny.make_model(name, "sdpa" if attention == "pieces" else attention, **settings)

    return make


def build(tokenizer: Any, config: JepaConfig) -> list[Forest]:
    return ForestBuilder(tokenizer, config).build(tiny.records())


def probe(states: Tensor, seed: int = 7) -> Tensor:
    """A scalar that every entry of the states matters to, each in its own way."""
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
    return (states * weights).sum() + 0.1 * (states.square() * weights.flip(0)).sum()


def lm_sum(model: Any, forest: Forest, states: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at all labelled tokens and their summed cross-entropy, by the model's own plain forward of a path."""
    labels = torch.from_numpy(forest.shift_labels).long()
    main = torch.from_numpy(forest.input_ids[: forest.segments[0].end]).long()[None]
    logits = model(input_ids=main, use_cache=False).logits[0]
    wanted = labels[: len(logits)]
    assert (labels[len(logits) :] == IGNORE).all()
    kept = wanted != IGNORE
    return logits[kept], F.cross_entropy(logits[kept], wanted[kept], reduction="sum")


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize(("architecture", "attention"), MODELS)
def test_forest_equals_separate_passes(
    architecture: str, attention: str, name: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    plain = tiny_model(architecture, attention)
    model = tiny_model(architecture, attention)
    enable_forest(model)
    assert model.config._attn_implementation == (EAGER if attention == "eager" else SDPA)
    forest = build(trained_tokenizer, CONFIGURATIONS[name])[0]
    assert len(forest.segments) >= 3

    slow = tiny.separate_states(plain, forest)
    logits, slow_lm = lm_sum(plain, forest, slow)
    expected = tiny.gradients(plain, probe(slow) + slow_lm)

    fast = tiny.forest_states(model, forest)
    outputs = forward(model, ForestCollator(0)([forest]))
    found = tiny.gradients(model, probe(fast) + outputs.lm_loss)
    with torch.no_grad():
        kept = forward(model, ForestCollator(0)([forest]), keep_logits=True)

    tiny.assert_same(fast, slow, what="hidden states")
    tiny.assert_same(kept.logits, logits, what="logits")
    tiny.assert_same(outputs.lm_loss, slow_lm, what="LM loss")
    tiny.assert_same(outputs.source, slow[forest.pairs[:, 0]], what="source embeddings")
    tiny.assert_same(outputs.target, slow[forest.pairs[:, 1]], what="target embeddings")
    tiny.assert_same_gradients(found, expected)


@pytest.mark.parametrize(("architecture", "attention"), MODELS)
def test_random_trees_equal_separate_passes(architecture: str, attention: str, tiny_model: ModelFactory) -> None:
    """Branches on branches and several roots, padded together in one batch."""
    plain = tiny_model(architecture, attention)
    model = tiny_model(architecture, attention)
    enable_forest(model)
    forests = [tiny.random_forest(seed, isolated=False) for seed in range(3)]
    states = tiny.hidden_states(model, ForestCollator(3)(forests))
    for row, forest in zip(states, forests, strict=True):
        tiny.assert_same(row[: len(forest)], tiny.separate_states(plain, forest))


@pytest.mark.parametrize("architecture", tiny.WITH_WINDOW)
def test_the_windows_bite(architecture: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Guards the tests above: with rows shorter than the window they would say nothing about windows."""
    forest = build(trained_tokenizer, CONFIGURATIONS["llm separate"])[0]
    model = tiny_model(architecture, "eager")
    wide = tiny_model(architecture, "eager", sliding_window=len(forest) + 1)
    ids = torch.from_numpy(forest.input_ids[: forest.segments[0].end]).long()[None]
    with torch.no_grad():
        difference = model(ids).logits - wide(ids).logits
    assert difference[:, : tiny.WINDOW].abs().max() < 1e-5
    assert difference[:, tiny.WINDOW :].abs().max() > 0.1


@pytest.mark.parametrize(
    ("k", "front", "reverse"),
    [(k, front, reverse) for k in (0, 1, 3) for front in (False, True) for reverse in (False, True) if k or not front],
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_option_equals_separate_passes(
    *, name: str, k: int, front: bool, reverse: bool, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    base = CONFIGURATIONS[name]
    config = JepaConfig(
        mode=base.mode, layout=base.layout, predictors=k, pairs="all", front_pred=front, reverse_pred=reverse
    )
    model = tiny_model("qwen3")
    plain = tiny_model("qwen3")
    enable_forest(model)
    for forest in build(trained_tokenizer, config):
        tiny.assert_same(tiny.forest_states(model, forest), tiny.separate_states(plain, forest))


# -- inplace: no plain pass gives the same numbers, so the reference is a dense mask written token by token ------------


@pytest.mark.parametrize("pairs", ["first", "all"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_inplace_equals_a_dense_mask(
    architecture: str, attention: str, pairs: Any, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    config = JepaConfig(mode="step-jepa", layout="inplace", predictors=2, pairs=pairs)
    forest = build(trained_tokenizer, config)[0]
    assert any(segment.isolated for segment in forest.segments)
    plain = tiny_model(architecture, "eager")
    allowed = tiny.dense_mask(forest)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]
    slow = plain.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids).long()[None],
        position_ids=torch.from_numpy(forest.position_ids).long()[None],
        attention_mask=additive,
        use_cache=False,
    ).last_hidden_state[0]
    head = plain.get_output_embeddings()
    labels = torch.from_numpy(forest.shift_labels).long()
    expected = tiny.gradients(plain, probe(slow) + F.cross_entropy(head(slow), labels, reduction="sum"))

    model = tiny_model(architecture, attention)
    enable_forest(model)
    fast = tiny.forest_states(model, forest)
    outputs = forward(model, ForestCollator(0)([forest]))
    found = tiny.gradients(model, probe(fast) + outputs.lm_loss)
    tiny.assert_same(fast, slow)
    tiny.assert_same_gradients(found, expected)


def test_inplace_hides_the_source_from_the_target(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """The isolated step inside the row embeds as it does alone: attention can't tell its rotary offset."""
    forest = build(trained_tokenizer, JepaConfig(mode="step-jepa", layout="inplace"))[0]
    (target,) = [segment for segment in forest.segments if segment.kind == "target"]
    model = tiny_model("llama")
    enable_forest(model)
    states = tiny.forest_states(model, forest)[target.start : target.end]
    alone = torch.from_numpy(forest.input_ids[target.start : target.end]).long()[None]
    tiny.assert_same(states, tiny_model("llama").get_decoder()(input_ids=alone).last_hidden_state[0])


# -- rows ------------------------------------------------------------------------------------------------------------


def total(model: Any, forests: list[Forest], encoding: str, objective: Objective) -> Tensor:
    batch = ForestCollator(0, encoding)(forests)
    sums = objective.sums(forward(model, batch))
    counts = torch.tensor([batch["label_ids"].numel(), batch["source_index"].numel(), 0])
    return objective.parts(sums, counts)["loss"]


@pytest.mark.parametrize("alignment", ["cosine", "infonce"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2_window", "gemma3_window"])
def test_rows_equal_forest(
    architecture: str, name: str, alignment: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    objective = Objective.from_config(JepaConfig(jepa_loss_type=alignment, lbd=2.0))  # type: ignore[arg-type]
    forests = build(trained_tokenizer, CONFIGURATIONS[name])
    rows, forest = tiny_model(architecture), tiny_model(architecture)
    enable_forest(forest)
    slow, fast = total(rows, forests, "rows", objective), total(forest, forests, "forest", objective)
    tiny.assert_same(fast, slow)
    tiny.assert_same_gradients(tiny.gradients(forest, fast), tiny.gradients(rows, slow))


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("architecture", tiny.RECURRENT)
def test_rows_equal_separate_passes_of_recurrent_models(
    architecture: str, name: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    """Padding stands on the right, where neither a state nor a convolution reaches back from."""
    forests = build(trained_tokenizer, CONFIGURATIONS[name])
    model = tiny_model(architecture)
    batch = ForestCollator(3, "rows")(forests)
    assert "position_ids" not in batch
    outputs = forward(model, batch, keep_logits=True)
    assert outputs.logits is not None
    found = tiny.gradients(model, probe(outputs.source) + probe(outputs.target) + outputs.logits.logsumexp(-1).sum())

    source, target, logits = [], [], []
    for forest in forests:
        states = tiny.separate_states(model, forest)
        source.append(states[forest.pairs[:, 0]])
        target.append(states[forest.pairs[:, 1]])
        logits.append(lm_sum(model, forest, states)[0])
    tiny.assert_same(outputs.source, torch.cat(source))
    tiny.assert_same(outputs.target, torch.cat(target))
    tiny.assert_same(outputs.logits, torch.cat(logits))
    slow = probe(torch.cat(source)) + probe(torch.cat(target)) + torch.cat(logits).logsumexp(-1).sum()
    tiny.assert_same_gradients(found, tiny.gradients(model, slow))


@pytest.mark.parametrize(("architecture", "kind"), [("mamba", "linear_attention"), ("lfm2", "conv")])
def test_forest_is_refused_where_layers_leak(architecture: str, kind: str, tiny_model: ModelFactory) -> None:
    model = tiny_model(architecture)
    with pytest.raises(ValueError, match=rf"{kind} layers.*use encoding 'rows'"):
        enable_forest(model)
    with pytest.raises(ValueError, match=rf"{kind} layers.*use encoding 'rows'"):
        choose_encoding(model, "forest")
    encoding, reason = choose_encoding(model, "auto")
    assert encoding == "rows"
    assert kind in reason
    assert choose_encoding(model, "rows")[0] == "rows"


@pytest.mark.parametrize("architecture", tiny.RECURRENT)
def test_the_refusal_is_not_idle(architecture: str, tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Guards the test above: in such a layer the target really hears what stands before it in the row."""
    forest = build(trained_tokenizer, CONFIGURATIONS["llm separate"])[0]
    model = tiny_model(architecture)
    with torch.no_grad():
        whole = model.get_decoder()(torch.from_numpy(forest.input_ids).long()[None]).last_hidden_state[0]
        assert float((whole - tiny.separate_states(model, forest))[forest.segments[1].start :].abs().max()) > 1e-2


@pytest.mark.parametrize("architecture", tiny.ATTENTION_ONLY)
def test_auto_takes_the_forest_for_attention(architecture: str, tiny_model: ModelFactory) -> None:
    encoding, reason = choose_encoding(tiny_model(architecture, "eager"), "auto")
    assert encoding == "forest"
    assert "attention" in reason


def test_flash_attention_gets_rows(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    encoding, reason = choose_encoding(model, "auto")
    assert encoding == "rows"
    assert "flash_attention_2" in reason
    with pytest.raises(ValueError, match="use encoding 'rows'"):
        choose_encoding(model, "forest")


def test_models_that_generate_no_text_are_refused() -> None:
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model(
        "bert", hidden_size=15, num_hidden_layers=1, num_attention_heads=3, intermediate_size=17, vocab_size=19
    )
    for wanted in ("auto", "forest", "rows"):
        with pytest.raises(ValueError, match="choose a causal language model"):
            choose_encoding(AutoModelForMaskedLM.from_config(config), wanted)


def test_outside_the_block_the_model_is_plain(tiny_model: ModelFactory) -> None:
    """Generation and evaluation run the same model without a forest, padding on the left included."""
    for attention in ("eager", "sdpa"):
        plain, model = tiny_model("gemma3_window", attention), tiny_model("gemma3_window", attention)
        enable_forest(model)
        ids = torch.randint(0, tiny.VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        with torch.no_grad():
            first, second = model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits
        tiny.assert_same(first[mask.bool()], second[mask.bool()])
