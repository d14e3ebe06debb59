"""The pairs of a step compared over its micro-batches, against one micro-batch with all of them, and by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from own_term import Margin
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.architecture import attach_heads
from stepjepa.models.attention import enable_trees
from stepjepa.models.encoded import Encoded
from stepjepa.objectives.alignment import Alignment
from stepjepa.objectives.cached_pairs import CachedTerm
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.objective import Losses, Objective, jepa_loss
from stepjepa.objectives.pair_cache import cache_pairs, check_compared_pairs, terms_of_steps
from stepjepa.objectives.term import Context, Term, term
from stepjepa.objectives.text import LMLoss
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.sequences import SampledRecord

STEP = {"compare_pairs_in": "step", "jepa_loss_type": "infonce", "lbd": 0.7}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "separate": {"mode": "llm-jepa", "predictor_head": "mlp"},
    "all steps, branched, with a record without a pair": {"mode": "step-jepa", "pairs": "all", "predictors": 3},
    "against collapse, from a middle layer": {
        "mode": "llm-jepa",
        "layout": "branched",
        "jepa_layer": 1,
        "sigreg": 0.3,
        "variance": 0.9,
        "covariance": 0.7,
    },
    "a target without gradient": {
        "mode": "step-jepa",
        "pairs": "all",
        "target_grad": "stop",
        "infonce_negatives": "all",
    },
    "means": {"mode": "llm-jepa", "pooling": "mean", "predictors": 2},
}


def ready(objective: Objective) -> Any:
    model = tiny.make_model("llama").double()
    enable_trees(model)
    attach_heads(model, objective.heads(model.config).copy())
    return model.double()


def of_step(
    model: Any, batches: list[Batch], objective: Objective, config: JepaConfig, context: Context | None = None
) -> list[Losses]:
    """The losses of the micro-batches of a step."""
    context = context or Context(seed=3)
    terms, counts = terms_of_steps(config, objective.terms), objective.counts(batches)
    cached = cache_pairs(model, batches, terms, context, layer=objective.layer)
    return [
        jepa_loss(model, batch, objective, counts, replace(context, cached=of_batch))
        for batch, of_batch in zip(batches, cached, strict=True)
    ]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_step_has_the_gradient_of_one_micro_batch(name: str, trained_tokenizer: Any) -> None:
    config = JepaConfig(**{**STEP, **CONFIGURATIONS[name]})
    objective = Objective.from_config(config)
    model = ready(objective)
    records = [
        SampledRecord(each, rng_key=(0, number))
        for number, each in enumerate(tiny.tokenized(trained_tokenizer, config))
    ]
    collator = tiny.collator(trained_tokenizer, config)
    one, parts = collator(records), [collator(records[:1]), collator(records[1:2]), collator(records[2:])]
    assert len({part.pairs for part in parts}) > 1 or config.mode == "llm-jepa"
    expected = jepa_loss(model, one, objective, context=Context(seed=3))
    found = of_step(model, parts, objective, config)
    for term_name, value in expected.parts.items():
        tiny.assert_same(torch.stack([losses.parts[term_name] for losses in found]).sum(), value, 1e-6, term_name)
    total = torch.stack([losses.loss for losses in found]).sum()
    whole = tiny.gradients(model, expected.loss)
    tiny.assert_same_gradients(tiny.gradients(model, total), whole, 1e-6)
    # Compared in their micro-batches, the pairs have another gradient.
    apart = sum(jepa_loss(model, part, objective, objective.counts(parts), Context(seed=3)).loss for part in parts)
    with pytest.raises(AssertionError):
        tiny.assert_same_gradients(tiny.gradients(model, apart), whole, 1e-3)


def test_a_distance_of_ones_own(trained_tokenizer: Any) -> None:
    config = JepaConfig(compare_pairs_in="step")
    objective = Objective([LMLoss(1.3), Alignment(0.7, Margin())])
    model = ready(objective)
    records = [*map(SampledRecord, tiny.tokenized(trained_tokenizer, config))]
    collator = tiny.collator(trained_tokenizer, config)
    expected = jepa_loss(model, collator(records), objective)
    total = sum(
        losses.loss for losses in of_step(model, [collator(records[:2]), collator(records[2:])], objective, config)
    )
    tiny.assert_same_gradients(tiny.gradients(model, total), tiny.gradients(model, expected.loss), 1e-6)


def test_gradients_of_sixteen_bit_embeddings_are_kept_in_float32(trained_tokenizer: Any) -> None:
    config = JepaConfig(**STEP)
    objective = Objective.from_config(config)
    model = ready(objective).to(torch.bfloat16)
    batches = [tiny.batch_of(trained_tokenizer, config)] * 2
    cached = cache_pairs(model, batches, terms_of_steps(config, objective.terms), Context())
    term_of_batch = cached[0].terms["jepa_loss"]
    assert {term_of_batch.source.dtype, term_of_batch.target.dtype, term_of_batch.share.dtype} == {torch.float32}
    assert term_of_batch.source.any()
    losses = jepa_loss(model, batches[0], objective, context=Context(cached=cached[0]))
    assert losses.parts["jepa_loss"].dtype == torch.float32
    assert cached[0].target.dtype == losses.target.dtype == torch.bfloat16
    losses.loss.backward()


def test_a_cached_term_by_hand() -> None:
    """Gradients 2 and 3 of one pair, of a share of 5."""
    source, target = torch.tensor([[7.0]], requires_grad=True), torch.tensor([[11.0]], requires_grad=True)
    value = CachedTerm(torch.tensor(5.0), torch.tensor([[2.0]]), torch.tensor([[3.0]])).sum(source, target)
    assert value.item() == 5
    value.backward()
    assert (source.grad, target.grad) == (torch.tensor([[2.0]]), torch.tensor([[3.0]]))


def test_infonce_of_a_step_by_hand(trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of one pair each: cosines of 1 with the right target and 0 with the other, temperature 0.5."""
    config = JepaConfig(compare_pairs_in="step", jepa_loss_type="infonce", infonce_temperature=0.5)
    objective = Objective.from_config(config)
    model = ready(objective)
    records = [*map(SampledRecord, tiny.tokenized(trained_tokenizer, config))][:2]
    batches = [tiny.collator(trained_tokenizer, config)([record]) for record in records]
    width, axes = model.config.hidden_size, iter([0, 1, 0, 1])

    def embeddings(_self: Encoded) -> tuple[Tensor, Tensor]:
        axis = next(axes)
        vector = torch.nn.functional.one_hot(torch.tensor([axis]), width).double().requires_grad_()
        return vector, 2 * vector

    monkeypatch.setattr(Encoded, "pairs", property(embeddings))
    terms = terms_of_steps(config, objective.terms)
    cached = cache_pairs(model, batches, terms, Context())
    # Each pair: log(e^2 + e^0) - 2.
    assert [of_batch.terms["jepa_loss"].share.item() for of_batch in cached] == pytest.approx(
        [math.log(1 + math.exp(-2))] * 2
    )


def test_dropout_is_that_of_the_first_pass_and_goes_on_afterwards(trained_tokenizer: Any) -> None:
    config = JepaConfig(**STEP)
    objective = Objective.from_config(config)
    model = ready(objective)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.4))
    model.train()
    records = [*map(SampledRecord, tiny.tokenized(trained_tokenizer, config))]
    collator = tiny.collator(trained_tokenizer, config)
    batches = [collator(records[:2]), collator(records[2:]), collator([None])]
    terms, context = terms_of_steps(config, objective.terms), Context()
    torch.manual_seed(5)
    cached = cache_pairs(model, batches, terms, context)
    after = torch.get_rng_state()
    assert cached[2].random is None  # nothing to embed
    for batch, of_batch in zip(batches[:2], cached, strict=False):
        losses = jepa_loss(model, batch, objective, context=replace(context, cached=of_batch))
        assert torch.equal(losses.target, of_batch.target)
        assert torch.equal(torch.get_rng_state(), after)
    jepa_loss(model, batches[0], objective)
    assert not torch.equal(torch.get_rng_state(), after)


@term("test_reads_labels", "reads labels")
@dataclass
class _ReadsLabels(Term):
    of_pairs = True
    compares_pairs = True

    def count(self, batch: Batch) -> int:
        return batch.pairs

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        return encoded.pairs[0].sum() * len(batch.label_ids)


def test_a_term_that_reads_more_than_pairs_is_refused(trained_tokenizer: Any) -> None:
    config = JepaConfig(compare_pairs_in="step")
    objective = Objective([_ReadsLabels()])
    batch = tiny.batch_of(trained_tokenizer, config)
    with pytest.raises(ValueError, match="and one reads 'label_ids'; use compare_pairs_in 'micro-batch'"):
        of_step(ready(objective), [batch], objective, config)


def test_the_setting_needs_a_term_that_compares_pairs() -> None:
    config = JepaConfig(compare_pairs_in="step")
    with pytest.raises(ValueError, match="no loss compares pairs; take `jepa_loss_type infonce`"):
        check_compared_pairs(config, Objective.from_config(config).terms)
    check_compared_pairs(config, Objective([Alignment(1.0, Margin())]).terms)


@pytest.mark.parametrize("more", [{}, {"target_grad": "ema", "ema_decay": 0.5, "sigreg": 0.2}, {"jepa_ratio": 0.5}])
def test_accumulation_trains_what_one_batch_trains(
    more: dict[str, Any], trained_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    def trained(batch_size: int, accumulation: int, where: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
        run = JepaTrainer(
            tiny.make_model("llama", seed=3),
            tiny.arguments(
                tmp_path / f"{where}{batch_size}",
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                num_train_epochs=2,
                learning_rate=0.05,
                optim="sgd",
                logging_steps=1,
            ),
            JepaConfig(mode="llm-jepa", jepa_loss_type="infonce", lbd=0.7, compare_pairs_in=where, **more),  # type: ignore[arg-type]
            train_dataset=tiny.records() * 3,
            processing_class=copy.deepcopy(trained_tokenizer),
        )
        run.train()
        names = ("loss", "jepa_loss", "sigreg_loss", "matched_similarity", "total_flos")
        lines = [{name: line[name] for name in names if name in line} for line in run.state.log_history]
        return {name: value.clone() for name, value in run.model.state_dict().items()}, lines

    expected, found = trained(5, 1, "micro-batch"), trained(1, 5, "step")
    for name, value in expected[0].items():
        tiny.assert_same(found[0][name], value, 1e-5, name)
    assert len(expected[1]) == 4  # three steps and the summary
    for line, same in zip(expected[1], found[1], strict=True):
        line.pop("total_flos", None)
        assert same.pop("total_flos", 1) > 0
        assert same == pytest.approx(line, rel=1e-4, abs=1e-5)


def test_a_loop_of_ones_own(trained_tokenizer: Any) -> None:
    records = tiny.records()

    def jepa_of(where: str) -> Jepa:
        config = JepaConfig(jepa_loss_type="infonce", lbd=0.7, compare_pairs_in=where)  # type: ignore[arg-type]
        return Jepa(tiny.make_model("llama", seed=3).double(), copy.deepcopy(trained_tokenizer), config)

    one, jepa = jepa_of("micro-batch"), jepa_of("step")
    expected = tiny.gradients(one.model, one.loss(one.model, one.collate(records)).loss)
    batches = [jepa.collate(records[:1]), jepa.collate(records[1:])]
    counts, pairs = jepa.counts(batches), jepa.step_pairs(jepa.model, batches)
    assert repr(pairs[1]) == "CachedPairs(2 pairs of a step; jepa_loss)"
    parts = zip(batches, pairs, strict=True)
    total = sum(jepa.loss(jepa.model, batch, counts, pairs=of_batch).loss for batch, of_batch in parts)
    tiny.assert_same_gradients(tiny.gradients(jepa.model, total), expected, 1e-6)
    # A step of one batch needs no first pass.
    alone = jepa.loss(jepa.model, jepa.collate(records)).loss
    tiny.assert_same_gradients(tiny.gradients(jepa.model, alone), expected, 1e-6)
    with pytest.raises(ValueError, match=r"needs those of jepa.step_pairs\(model, batches\)"):
        jepa.loss(jepa.model, batches[0], counts)
    with pytest.raises(ValueError, match="compare_pairs_in is 'micro-batch'"):
        one.step_pairs(one.model, batches)
