"""Records that begin alike are drawn together, each once an epoch, however steps are cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tiny
from stepjepa.base.errors import UserError
from stepjepa.batch.dataset import STRATEGIES, StepSampler
from stepjepa.batch.flat_record import flattened, prompt_of
from stepjepa.batch.groups import prompt_groups
from stepjepa.batch.prepare import prepare
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.run import RunConfig
from stepjepa.objectives.objective import jepa_loss
from stepjepa.running.first_screen import describe_groups, first_screen
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.sequences import TokenizedRecord


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def alike(prompts: list[Any]) -> list[list[int]]:
    """The records of each group."""
    groups = prompt_groups(prompts).tolist()
    return sorted([index for index, group in enumerate(groups) if group == each] for each in set(groups))


def test_groups_by_hand() -> None:
    # All begin with 1, which does not count. The first and the last are equal.
    assert alike([ids(1, 5, 6), ids(1, 7, 8), ids(1, 5, 6)]) == [[0, 2], [1]]
    # Of four and six tokens behind the 1 the two have three in common: half of the longer.
    assert alike([ids(1, 5, 6, 7, 8), ids(1, 9), ids(1, 5, 6, 7, 3, 2, 4)]) == [[0, 2], [1]]
    # Two in common are less than half.
    assert alike([ids(1, 5, 6, 7, 8), ids(1, 9), ids(1, 5, 6, 3, 3, 2, 4)]) == [[0], [1], [2]]
    # Negative numbers never occur, but large ones do: they sort as numbers.
    assert alike([ids(300, 1), ids(2, 1), ids(300, 1), ids(70_000, 1), ids(2, 1)]) == [[0, 2], [1, 4], [3]]
    assert alike([ids(4), ids(4)]) == [[0, 1]]
    assert alike([ids(4)]) == [[0]]
    assert alike([]) == []


def test_a_prompt_ends_with_the_token_before_the_first_trained_one() -> None:
    """Two prompts that differ in their last token alone are two, and one that ends earlier is another."""

    def prompt(tokens: list[int], labels: list[int], user: Sequence[int] = ()) -> list[int]:
        record = TokenizedRecord(ids(*tokens), ids(*labels), ids(*user))
        return prompt_of(flattened(record)).tolist()

    # Positions 2 and 3 predict the answer, tokens 8 and 9.
    assert prompt([4, 5, 6, 8, 9], [2, 3]) == [4, 5, 6]
    assert prompt([4, 5, 7, 8, 9], [2, 3]) == [4, 5, 7]
    # The user's tokens, 5 and 6, are labelled for a loss of their own, in front of the answer.
    assert prompt([4, 5, 6, 7, 8, 9], [3, 4], [0, 1]) == [4, 5, 6, 7]
    # They are trained, too: the prompt ends with the first message, tokens 5 and 6, or 5 alone.
    assert prompt([4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [0, 1]) == [4, 5, 6]
    assert prompt([4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [0, 3]) == [4, 5]


def test_groups_against_a_slow_search() -> None:
    """Joined are neighbours in the order of their tokens that share half of the longer prompt."""
    generator = np.random.default_rng(3)
    for _ in range(50):
        prompts = [ids(9, *generator.integers(0, 2, generator.integers(1, 9))) for _ in range(17)]
        listed = [prompt.tolist() for prompt in prompts]

        def shared(first: list[int], second: list[int]) -> int:
            return next(
                (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
                min(len(first), len(second)),
            )

        order = sorted(range(len(listed)), key=lambda index: (listed[index], index))
        common = min(shared(a, b) for a in listed for b in listed)
        expected = [[order[0]]]
        for before, own in pairwise(order):
            longer = max(len(listed[before]), len(listed[own]))
            if 2 * (shared(listed[before], listed[own]) - common) >= longer - common:
                expected[-1].append(own)
            else:
                expected.append([own])
        assert alike(prompts) == sorted(map(sorted, expected))


SIZES = [1, 3, 8, 2, 1, 13, 1, 5, 1, 7, 1, 1]
GROUPS = np.random.default_rng(5).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
LENGTHS = np.random.default_rng(6).integers(5, 97, len(GROUPS)).tolist()


def epoch(number: int = 0, **options: Any) -> list[int]:
    sampler = StepSampler(LENGTHS, options.pop("size", 8), groups=GROUPS, **options)
    sampler.set_epoch(number)
    return [key.record for key in sampler if key.record >= 0]


@pytest.mark.parametrize("sort_by_length", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_record_once_and_groups_together(strategy: str, sort_by_length: bool) -> None:
    orders = []
    for number in range(3):
        order = epoch(number, strategy=strategy, sort_by_length=sort_by_length)
        assert sorted(order) == list(range(len(GROUPS)))
        steps = [order[start : start + 8] for start in range(0, len(order), 8)]
        for step in steps:
            runs = [group for group, _ in groupby(GROUPS[index] for index in step)]
            assert len(runs) == len(set(runs)), "a group stands in two places of a step"
        # A group is over with the step that follows its first one, unless it is larger than a step.
        for group, size in enumerate(SIZES):
            places = [number for number, step in enumerate(steps) if any(GROUPS[index] == group for index in step)]
            assert places == list(range(places[0], places[0] + len(places)))
            assert len(places) <= -(-size // 8) + 1
        orders.append(order)
    assert (orders[0] == orders[1]) == (strategy == "sequential")


def test_groups_are_shuffled_as_a_whole_and_large_ones_are_not_drawn_first() -> None:
    order = [epoch(number, size=len(GROUPS), sort_by_length=False) for number in range(300)]
    firsts = [int(GROUPS[each[0]]) for each in order]
    counts = np.bincount(firsts, minlength=len(SIZES))
    # Each of the 12 begins an epoch as often: 25 of 300 times.
    assert counts.min() > 10 and counts.max() < 45


def test_the_length_sort_moves_whole_groups() -> None:
    for number in range(3):
        order = epoch(number)
        for start in range(0, len(order), 8):
            step = order[start : start + 8]
            parts = [list(part) for _, part in groupby(step, key=lambda index: GROUPS[index])]
            longest = [max(LENGTHS[index] for index in part) for part in parts]
            assert longest == sorted(longest)
            assert all([LENGTHS[i] for i in part] == sorted(LENGTHS[i] for i in part) for part in parts)


def test_steps_of_groups_do_not_depend_on_processes_and_accumulation() -> None:
    for number in range(2):
        whole = epoch(number, multiple=8)
        assert whole == epoch(number, multiple=4) == epoch(number, multiple=1)


# -- runs --------------------------------------------------------------------------------------------------------------

QUESTIONS = ["What is 2 and 3?", "Name a fruit that is red.", "How many legs has a spider?"]


def records() -> list[Any]:
    """Four answers to each question, mixed."""
    answers = [[f"Number {index} says {word * (index + 1)}." for word in ("yes ", "no ", "one ")] for index in range(4)]
    return [
        tiny.make_record("Answer.", QUESTIONS[question], answers[index][question], line=index * 3 + question + 1)
        for index in range(4)
        for question in range(3)
    ]


def make_trainer(tokenizer: Any, folder: Path, config: JepaConfig, group_by: Any, **arguments: Any) -> JepaTrainer:
    fixed = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "max_steps": -1, "logging_steps": 1}
    fixed["lr_scheduler_type"] = "constant"
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, **{**fixed, **arguments}),
        config,
        train_dataset=records(),
        processing_class=copy.deepcopy(tokenizer),
        group_by=group_by,
    )


@pytest.mark.parametrize("labels", ["assistant", "all", "reference"])
def test_the_prompt_ends_where_the_answer_begins(labels: Any, trained_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(trained_tokenizer)
    dataset = prepare(records(), tokenizer, JepaConfig(mode="regular", labels=labels), cache_dir=False).dataset
    for number, prompt in enumerate(dataset.prompts()):
        text = tokenizer.decode(prompt)
        assert QUESTIONS[number % 3] in text and "says" not in text
        assert labels != "assistant" or "assistant" in text
    assert alike(dataset.prompts()) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_a_grouped_run_has_the_losses_of_separate_rows(trained_tokenizer: Any, tmp_path: Path) -> None:
    """Each micro-batch holds one question, computed once; and the losses are those of plain rows."""
    lines = []
    for encoding in ("tree", "rows"):
        run = make_trainer(trained_tokenizer, tmp_path / encoding, JepaConfig(encoding=encoding), "prompt")
        for keys in run.plan.keys(0):
            assert len({key.record % 3 for key in keys}) == 1
        run.train()
        lines.append([line for line in run.state.log_history if "lm_loss" in line])
    for tree, rows in zip(*lines, strict=True):
        assert tree["lm_loss"] == pytest.approx(rows["lm_loss"], rel=2e-4)
        assert tree["jepa_loss"] == pytest.approx(rows["jepa_loss"], rel=2e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cosine", "infonce"])
def test_a_grouped_run_that_is_resumed_within_an_epoch_is_the_same(
    loss: Any, trained_tokenizer: Any, tmp_path: Path
) -> None:
    config, saved = JepaConfig(jepa_loss_type=loss), {"save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(trained_tokenizer, tmp_path / "whole", config, "prompt")
    whole.train()
    begun = make_trainer(trained_tokenizer, tmp_path / "run", config, "prompt", max_steps=4, **saved)
    begun.train()
    further = make_trainer(trained_tokenizer, tmp_path / "run", config, "prompt", **saved)
    further.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, further.model.state_dict()[name]), name
    with pytest.raises(UserError, match=r"other settings \(`group_by`: prompt -> none\)"):
        make_trainer(trained_tokenizer, tmp_path / "run", config, None, **saved).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("group_by", [None, "prompt"])
def test_infonce_of_both_orders_against_a_slow_loop(group_by: Any, trained_tokenizer: Any, tmp_path: Path) -> None:
    """Answers to one question are no negatives of each other, so a micro-batch of one question has none."""
    config = JepaConfig(jepa_loss_type="infonce", infonce_temperature=0.5)
    run = make_trainer(trained_tokenizer, tmp_path, config, group_by)
    for keys in run.plan.keys(0):
        (batch,) = run.plan.micro_batches(keys)
        losses = jepa_loss(run.model, batch, run.objective)
        source, target = (F.normalize(side, dim=-1) for side in (losses.source, losses.target))
        expected = 0.0
        for own, key in enumerate(keys):
            negatives = [
                math.exp(float(source[own] @ target[other]) / 0.5)
                for other, another in enumerate(keys)
                if another.record % 3 != key.record % 3
            ]
            matched = math.exp(float(source[own] @ target[own]) / 0.5)
            expected += math.log((matched + sum(negatives)) / matched)
        assert losses.parts["jepa_loss"].item() == pytest.approx(expected / len(keys), rel=1e-4, abs=1e-6)
        assert (expected == 0) == (group_by == "prompt")


def test_what_is_saved_is_said(trained_tokenizer: Any, tmp_path: Path) -> None:
    config = JepaConfig(mode="regular", row_length=512)
    plain = make_trainer(trained_tokenizer, tmp_path, config, None)
    assert describe_groups(plain.plan) is None
    grouped = make_trainer(trained_tokenizer, tmp_path, config, "prompt")

    def tokens(trainer: JepaTrainer) -> int:
        return sum(batch.num_tokens for keys in trainer.plan.keys(0) for batch in trainer.plan.micro_batches(keys))

    saved = 1 - tokens(grouped) / tokens(plain)
    assert saved > 0.1
    row = f"12 records in 3 groups by prompt, which saves {saved:.1%} of the tokens"
    run = RunConfig(model_name="m", train_file="t.jsonl", output_dir=str(tmp_path), group_by="prompt")
    assert dict(first_screen(run, grouped, None, {}))["groups"] == row


def test_grouping_that_saves_nothing_is_refused(trained_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`group_by` saves nothing with `share_prefixes` false"):
        RunConfig(group_by="prompt", jepa=JepaConfig(share_prefixes=False))
    with pytest.raises(ValueError, match="group_by saves nothing with share_prefixes False"):
        make_trainer(trained_tokenizer, tmp_path, JepaConfig(share_prefixes=False), "prompt")
    with pytest.raises(ValueError, match="group_by: expected 'prompt' or None, got 'length'"):
        make_trainer(trained_tokenizer, tmp_path, JepaConfig(), "length")
