"""Drawn runs that meet losses and gradients that are not finite: every such step left out as if it had never been.

The seeds are drawn from ``SOAK_SEED`` where it is given; ``NONFINITE_SEEDS=3,17`` runs those alone. The figures go to
``soak/nonfinite.json``, or into ``SOAK_FIGURES``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harmful import made, same, trainer_of, weights
from soak_figures import SEED, note
from stepjepa.batch.stream import RecordStream
from stepjepa.errors import UserError

DRAWN = random.Random(SEED).sample(range(10**6), 40)
SEEDS = [int(seed) for seed in os.environ.get("NONFINITE_SEEDS", ",".join(map(str, DRAWN))).split(",")]


@pytest.fixture(scope="module")
def passed() -> Iterator[list[int]]:
    """Seeds of runs that were as they should be, written down in the end."""
    seeds: list[int] = []
    yield seeds
    note("nonfinite", {"runs": len(SEEDS), "passed": len(seeds), "seeds": seeds})


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_skipped_as_if_it_had_never_been(seed: int, tiny_tokenizer: Any, tmp_path: Path, passed: list[int]) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    batch, accumulation, steps = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.randint(3, 7)
    size = batch * accumulation
    spoiled = sorted(draw.sample(range(1, steps + 1), draw.randint(1, steps - 1)))
    bad = sorted({(step - 1) * size + draw.randint(1, size) for step in spoiled for _ in range(draw.randint(1, 3))})
    kind, streamed = draw.choice(["loss", "gradient"]), draw.random() < 0.3
    jepa = {
        "encoding": draw.choice(["rows", "tree"]),
        "jepa_loss_type": draw.choice(["cosine", "l2", "mse"]),
        "pairs": draw.choice(["first", "all"]),
        "lbd": draw.choice([0.1, 2.0]),
    }
    jepa |= draw.choice([{}, {"target_grad": "stop"}, {"target_grad": "ema"}, {"predictor_head": "linear"}])
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "optim": draw.choice(["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"]),
        "max_grad_norm": draw.choice([0.0, 1.0]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "lr_scheduler_type": "constant",
    }
    records = made(size * steps, bad)
    source = RecordStream(records) if streamed else records

    skipping = trainer_of(
        tiny_tokenizer, tmp_path / "skip", source, kind, jepa=jepa, on_nonfinite="skip", max_steps=steps, **arguments
    )
    skipping.train()
    assert skipping.guard.skipped == len(spoiled)
    rest = [record for record in made(size * steps, []) if (record.line - 1) // size + 1 not in spoiled]
    without = trainer_of(
        tiny_tokenizer, tmp_path / "rest", rest, kind, jepa=jepa, max_steps=steps - len(spoiled), **arguments
    )
    without.train()
    assert same(weights(skipping), weights(without))

    stopping = trainer_of(tiny_tokenizer, tmp_path / "stop", source, kind, jepa=jepa, max_steps=steps, **arguments)
    with pytest.raises(UserError) as caught:
        stopping.train()
    assert str(caught.value).startswith(f"step {spoiled[0]}: ")
    named = {line for line in bad if f".jsonl:{line}" in str(caught.value) or f"<memory>:{line}" in str(caught.value)}
    assert named >= {line for line in bad if (line - 1) // size + 1 == spoiled[0]}
    passed.append(seed)
