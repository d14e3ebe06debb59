"""Splitting a batch by length: the cheapest cut, and nothing but the time changes."""

import itertools
import random
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.grouping import GroupCollator, split_by_length
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward_groups
from stepjepa.objectives.objective import Objective


def cost(lengths: list[int], groups: list[list[int]], pass_cost: int) -> int:
    return sum(len(group) * max(lengths[index] for index in group) + pass_cost for group in groups)


@pytest.mark.parametrize("seed", range(11))
def test_no_cut_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 97) for _ in range(7)]
    pass_cost = draw.choice([0, 13, 61, 499])
    groups = split_by_length(lengths, pass_cost)
    assert sorted(itertools.chain(*groups)) == list(range(7))
    # Every way of labelling rows with groups; the best one need not be cut out of the sorted order.
    ways = (
        itertools.product(range(7), repeat=7)
        if seed < 2
        else ([draw.randrange(4) for _ in range(7)] for _ in range(5000))
    )
    least = min(
        cost(lengths, [[i for i in range(7) if way[i] == label] for label in set(way)], pass_cost) for way in ways
    )
    assert cost(lengths, groups, pass_cost) <= least


def test_equal_rows_stay_together_and_a_dear_pass_never_splits() -> None:
    assert split_by_length([5, 5, 5], 3) == [[0, 1, 2]]
    assert split_by_length([100, 1, 1], 10) == [[1, 2], [0]]
    assert split_by_length([100, 1, 1], 10**6) == [[1, 2, 0]]
    assert split_by_length([], 10) == []


@pytest.mark.parametrize("loss", ["cosine", "infonce"])
@pytest.mark.parametrize("encoding", ["forest", "rows"])
def test_groups_change_neither_loss_nor_gradient(encoding: str, loss: str, tiny_tokenizer: Any) -> None:
    config = JepaConfig(mode="step-jepa", pairs="all", jepa_loss_type=loss, lbd=0.7)  # type: ignore[arg-type]
    forests = ForestBuilder(tiny_tokenizer, config).build(tiny.records())
    model = tiny.make_model("llama").double()
    enable_forest(model)
    objective = Objective.from_config(config)
    found = []
    for pass_cost in (None, 1):
        batch = GroupCollator(ForestCollator(0, encoding), pass_cost)(forests)
        outputs = forward_groups(model, batch["groups"])
        sums = objective.sums(outputs)
        found.append((len(batch["groups"]), sums, tiny.gradients(model, sums["lm_loss"] + sums["jepa_loss"])))
    (one, whole, gradients), (several, parts, same_gradients) = found
    assert one == 1 < several
    assert parts["lm_loss"].item() == pytest.approx(whole["lm_loss"].item(), rel=1e-6)
    assert parts["jepa_loss"].item() == pytest.approx(whole["jepa_loss"].item(), rel=1e-5)
    tiny.assert_same_gradients(gradients, same_gradients)


def test_empty_places_make_an_empty_batch() -> None:
    (group,) = GroupCollator(ForestCollator(0), 64)([None, None])["groups"]
    assert group["label_ids"].numel() == 0
    assert torch.equal(group["num_records"], torch.tensor([0, 0]))


def test_members_are_those_of_the_rows(tiny_tokenizer: Any) -> None:
    """In the order of the groups, and no tensors: no device is sent them, whatever moves the batch."""
    records = [*tiny.records(), tiny.make_record("", "q", "long " * 31, line=29)]
    forests = ForestBuilder(tiny_tokenizer, JepaConfig(mode="regular")).build(records)
    batch = GroupCollator(ForestCollator(0), 1)([forests[3], None, *forests[:3]])
    members = batch["members"]
    rows = [row for group in batch["groups"] for row in group["input_ids"].tolist()]
    by_line = {forest.line: forest for forest in forests}
    assert sorted(members.lines) == [1, 2, 3, 29]
    assert members.lines[-1] == 29
    for row, line, length in zip(rows, members.lines, members.lengths, strict=True):
        assert row[:length] == by_line[line].input_ids.tolist()
    moved = send_to_device(dict(batch), torch.device("meta"))
    assert moved["members"] is members
    assert moved["groups"][0]["input_ids"].device.type == "meta"
    assert GroupCollator(ForestCollator(0))([None])["members"].lines == ()
