"""Which blocks a training computes again in the backward pass: as its arguments say, and as it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.training.argument_checks import check_arguments
from stepjepa.training.recomputation import Recomputation

# The oldest transformers that is allowed has this name alone, the newest warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")


def with_options(**options: Any) -> dict[str, Any]:
    """Arguments of a training with options of gradient checkpointing."""
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}


@pytest.mark.parametrize("every_n_layers", [1, 2, 3])
def test_a_training_counts_what_it_measures(every_n_layers: int, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """``total_flos`` and ``same_flop`` are what ``track_flop`` measures."""
    trainer = JepaTrainer(
        tiny.make_model("llama", "eager", num_hidden_layers=7),
        tiny.arguments(tmp_path, **with_options(every_n_layers=every_n_layers)),
        JepaConfig(predictors=1),
        train_dataset=tiny.records(),
        processing_class=tiny_tokenizer,
        track_flop=True,
    )
    trainer.train()
    trainer.tracker.close()
    assert trainer.state.total_flos == sum(trainer.tracker.measured) > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"gradient_checkpointing": True}, Recomputation()),
        (with_options(use_reentrant=True), Recomputation(reentrant=True)),
        (with_options(every_n_layers=3), Recomputation(3)),
        (with_options(every_n_layers=3, offload=True, use_reentrant=False), Recomputation(3, offload=True)),
        # Torch's own default, where other options are passed on to it.
        (with_options(preserve_rng_state=True), Recomputation(reentrant=True)),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 3}}, None),
        # FSDP has an option of its own, whose wrapper is not reentrant; without FSDP it does nothing.
        ({"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}, Recomputation()),
        ({"fsdp_config": {"activation_checkpointing": True}}, None),
    ],
)
def test_what_is_recomputed_is_named_by_the_arguments(
    options: dict[str, Any], expected: Recomputation | None, tmp_path: Path
) -> None:
    assert Recomputation.of(tiny.arguments(tmp_path, **options)) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_n_layers": 0}, "^every_n_layers: expected 1 or more, got 0$"),
        ({"every_n_layers": "two"}, "^every_n_layers: expected a whole number, got 'two'$"),
        ("every second", "^(activation|gradient)_checkpointing_kwargs: expected a dict, .* got 'every second'$"),
    ],
)
def test_options_of_checkpointing_that_can_not_be_are_refused(options: Any, words: str, tmp_path: Path) -> None:
    """They were errors of the first step."""
    arguments = tiny.arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    with pytest.raises((TypeError, ValueError), match=words):
        check_arguments(arguments)
