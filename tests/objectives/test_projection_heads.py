"""Projection heads behind embeddings: against a plain loop, and where no linear map finds the answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepjepa.objectives.fitted import sides_behind
from stepjepa.objectives.head_training import EVERY, epochs_of, fit_heads
from stepjepa.objectives.linear_map import fit_linear_maps
from stepjepa.objectives.projection_heads import ProjectionHeads

Sides = tuple[Any, Any]


def random_sides(count: int) -> Sides:
    generator = np.random.default_rng(5)
    source, target = 3 + generator.normal(size=(2, count, 13))
    return source.astype(np.float32), target.astype(np.float32)


def slow_heads(sides: Sides, same: Any, epochs: int) -> Sides:
    """The known sides behind heads that are trained pair by pair, by the formulas of the docstrings."""
    values = [torch.as_tensor(side) for side in sides]
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(13, 512), nn.GELU(), nn.Linear(512, 128)) for _ in sides]
    weights = [weight for network in networks for weight in network.parameters()]
    optimizer = torch.optim.AdamW(weights, 1e-3, weight_decay=0.01)
    batches = -(-len(same) // 128)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)

    def behind() -> list[torch.Tensor]:
        centred = [(value - value.mean(0)) / (value.std(0) + 1e-6) for value in values]
        return [F.normalize(network(value), dim=-1) for network, value in zip(networks, centred, strict=True)]

    for _ in range(epochs):
        order = torch.randperm(len(same)).tolist()
        for start in range(0, len(same), 128):
            batch, (source, target) = order[start : start + 128], behind()
            loss = torch.zeros(())
            for pair in batch:
                candidates = [other for other in batch if other == pair or same[other] != same[pair]]
                logits = (source[pair] @ target[candidates].T)[None] / 0.07
                loss = loss + F.cross_entropy(logits, torch.tensor([candidates.index(pair)]))
            optimizer.zero_grad()
            (loss / len(batch)).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        source, target = behind()
    return source.numpy(), target.numpy()


def test_heads_are_those_of_a_plain_loop() -> None:
    sides, same = random_sides(131), np.arange(131) % 127  # two batches, some equal targets
    state = torch.random.get_rng_state()
    _, heads = fit_heads(*sides, same, lambda _: 0.0, epochs=2)
    assert torch.equal(torch.random.get_rng_state(), state), "a fit must not move the global generator"
    for actual, expected in zip(sides_behind(heads, *sides), slow_heads(sides, same, 2), strict=True):
        assert actual.shape == (131, 128) and actual.dtype == np.float32
        length = np.linalg.norm(actual, axis=1, keepdims=True)
        np.testing.assert_allclose(actual / length, expected, atol=1e-4)


def test_a_fit_leaves_the_generators_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` seeds them, too, and nothing would bring back their state."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    fit_heads(*random_sides(5), np.arange(5), lambda _: 0.0, epochs=1)
    assert seeded == []


@pytest.mark.parametrize(
    ("pairs", "steps", "epochs"),
    [
        (7000, None, 60),  # 55 steps an epoch
        (300, None, 334),  # 3 steps, so that there are 1,000
        (20, None, 1000),
        (50_000, None, 12),  # 391 steps, at most 5,000
        (1_000_000, None, 1),
        (1000, 320, 40),
        (300, 320, 107),
        (100_000, 320, 1),
    ],
)
def test_epochs_by_hand(pairs: int, steps: int | None, epochs: int) -> None:
    assert epochs_of(pairs, steps) == epochs


def test_heads_of_the_best_look_are_returned() -> None:
    sides, same = random_sides(23), np.arange(23)
    ranks = iter((0.25, 0.5, 0.5, 0.125))
    looks: list[int] = []

    def rank(heads: ProjectionHeads) -> float:
        looks.append(heads.epochs)
        return next(ranks)

    highest, heads = fit_heads(*sides, same, rank, epochs=3 * EVERY + 2)
    assert looks == [EVERY, 2 * EVERY, 3 * EVERY, 3 * EVERY + 2]
    # Of equal ones the later.
    assert (highest, heads.epochs) == (0.5, 3 * EVERY)
    # The weights are those of that look, not of the end.
    _, earlier = fit_heads(*sides, same, lambda each: float(each.epochs == 3 * EVERY), epochs=3 * EVERY + 2)
    _, last = fit_heads(*sides, same, lambda each: float(each.epochs), epochs=3 * EVERY + 2)
    assert np.array_equal(heads(sides[0], "source"), earlier(sides[0], "source"))
    assert not np.allclose(heads(sides[0], "source"), last(sides[0], "source"))


def test_heads_find_what_no_linear_map_does() -> None:
    generator = np.random.default_rng(3)
    signs = np.sign(generator.normal(size=(150, 2)))
    # The answer is whether two signs are equal, of which every linear function of them knows nothing.
    same = (signs.prod(1) > 0).astype(np.int64)
    sides = signs.astype(np.float32), np.eye(2, dtype=np.float32)[same]
    known, held_out, new = ([side[part] for side in sides] for part in (slice(101), slice(101, 128), slice(128, None)))

    def right(pairs: list[Any], answers: Any, to_sides: Callable[[Any, Any], Sides]) -> float:
        source, target = to_sides(*pairs)
        candidates = np.stack([target[answers == answer][0] for answer in (0, 1)])
        return float((np.argmax(source @ candidates.T, 1) == answers).mean())

    rank, heads = fit_heads(
        *known, same[:101], lambda each: right(held_out, same[101:128], partial(sides_behind, each)), epochs=30
    )
    assert rank == 1 == right(new, same[128:], partial(sides_behind, heads))
    for linear_map in fit_linear_maps(*known):
        assert right(new, same[128:], partial(sides_behind, linear_map)) < 0.9
    assert heads.epochs in range(EVERY, 31, EVERY)
