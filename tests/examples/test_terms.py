"""The terms of examples/terms: the same in every packing, and trained from the command line."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny
from slow_trees import random_records
from stepjepa import Jepa, JepaConfig, UserError
from stepjepa.base.files import write_jsonl
from stepjepa.batch.collate import Collator
from stepjepa.batch.costs import Costs
from stepjepa.batch.micro_batch import Batch, BatchRecords
from stepjepa.cli.main import main
from stepjepa.models.architecture import attach_heads, find_heads
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.objectives.text import LMLoss
from stepjepa.views.sequences import SampledRecord, TokenizedRecord

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "terms"
TERMS = {"nextlat": "NextLat", "multi_token": "MultiToken", "bag_of_tokens": "BagOfTokens"}
TERMS |= {"nitp": "NextImplicitToken", "in_row_infonce": "InRowInfoNCE", "random_span": "RandomSpan"}
PACKINGS: list[dict[str, Any]] = [
    {"row_length": 500},
    {"row_length": 13},
    {"row_length": 61, "share_prefixes": False},
    {"row_length": 61, "costs": Costs(1, 1)},
    {"encoding": "rows"},
]


@pytest.mark.parametrize("module", TERMS)
def test_every_packing_gives_the_same(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = getattr(importlib.import_module(module), TERMS[module])()
    model = tiny.make_model("llama")
    enable_trees(model)
    objective = Objective([LMLoss(), made])
    attach_heads(model, objective.heads(model.config))
    items = [SampledRecord(record, True, (0, index)) for index, record in enumerate(random_records(3, vocabulary=60))]

    def run(options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = Collator("separate", np.array([61], np.int32), **options)([*items, None])
        losses = jepa_loss(model, batch, objective, context=Context(progress=0.1))
        assert losses.parts[made.name] > 0
        return losses.loss.detach(), tiny.gradients(model, losses.loss)

    first = run(PACKINGS[0])
    for options in PACKINGS[1:]:
        other = run(options)
        tiny.assert_same(first[0], other[0], what=str(options))
        tiny.assert_same_gradients(first[1], other[1])
    empty = jepa_loss(model, Collator("separate", np.array([61], np.int32))([None]), objective)
    assert empty.loss.item() == 0


@pytest.mark.parametrize(
    ("module", "args"),
    [("nitp", {}), ("in_row_infonce", {}), ("nextlat", {}), ("nextlat", {"wrong": True}), ("random_span", {})],
)
def test_the_value_from_each_text_by_itself(module: str, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = getattr(importlib.import_module(module), TERMS[module])(**args)
    model, records = tiny.make_model("llama"), random_records(3, vocabulary=60)
    objective = Objective([made])
    attach_heads(model, objective.heads(model.config))
    collator = Collator("separate", np.array([61], np.int32), encoding="rows")
    items = [SampledRecord(each, rng_key=(2, index)) for index, each in enumerate(records)]
    result = jepa_loss(model, collator(items), objective, context=Context(seed=5)).parts[made.name]
    texts = [torch.from_numpy(np.asarray(record.ids, np.int64)) for record in records]
    states = [model(input_ids=text[None], output_hidden_states=True).hidden_states for text in texts]
    if module == "nitp":
        projection = find_heads(model)[made.name]
        angles = [
            1 - torch.cosine_similarity(projection(each[-1][0, place]), each[1][0, place + 1], dim=0)
            for each, text in zip(states, texts, strict=True)
            for place in range(len(text) - 1)
        ]
        expected = torch.stack(angles).mean()
    elif module == "nextlat":
        network = find_heads(model)[made.name]
        hidden = [(each[-1][0], each[0][0]) for each in states]
        predicted = torch.cat([network(torch.cat([h[:-1], e[1:]], -1)) + h[:-1] for h, e in hidden])
        latents = torch.cat([h[1:] for h, _ in hidden])
        half = len(latents) // 2 if args else 0
        expected = torch.stack(
            [torch.nn.functional.smooth_l1_loss(one, latents[place - half]) for place, one in enumerate(predicted)]
        ).mean()
    elif module == "random_span":
        draws = [np.random.default_rng((5, *item.rng_key)) for item in items]
        messages = [sorted({*map(int, each.prompt), *map(int, each.labels)}) for each in records]
        draw_span = importlib.import_module("random_span").span
        spans = [draw_span(len(each), draw) for each, draw in zip(messages, draws, strict=True)]
        angles = []
        for each, places, (first, last) in zip(states, messages, spans, strict=True):
            moves = [each[-1][0, place + 1] - each[-1][0, place] for place in places]
            patch, around = sum(moves[first:last]), sum(moves[:first] + moves[last:])
            angles.append(1 - torch.cosine_similarity(patch, around, dim=0))
        expected = torch.stack(angles).mean()
    else:
        firsts = [int(min(record.labels)) for record in records]
        ends = [each[-1][0, first] for each, first in zip(states, firsts, strict=True)]
        answers = [each[0][0, first + 1 :].mean(0) for each, first in zip(states, firsts, strict=True)]
        scores = [torch.stack([torch.cosine_similarity(end, one, dim=0) for one in answers]) / 0.07 for end in ends]
        sides = [
            (text[: first + 1].tolist(), text[first + 1 :].tolist()) for text, first in zip(texts, firsts, strict=True)
        ]
        remaining = [
            [
                other
                for other, pair in enumerate(sides)
                if other == own or not (pair[0] == mine[0] or pair[1] == mine[1])
            ]
            for own, mine in enumerate(sides)
        ]
        losses = [-score[remaining[own]].log_softmax(0)[remaining[own].index(own)] for own, score in enumerate(scores)]
        expected = torch.stack(losses).mean()
    assert result.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_span_is_some_of_the_tokens_and_each_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    result = {importlib.import_module("random_span").span(5, np.random.default_rng(seed)) for seed in range(400)}
    assert result == {(first, last) for first in range(5) for last in range(first + 1, 6)} - {(0, 5)}


def test_a_random_span_asks_for_the_labels_that_say_what_a_message_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = importlib.import_module("random_span").RandomSpan()
    record = random_records(3, vocabulary=60)[0]
    every = dataclasses.replace(record, labels=np.arange(len(record.ids) - 1, dtype=np.int32))
    batch = Collator("separate", np.array([61], np.int32))([SampledRecord(every)])
    with pytest.raises(ValueError, match="set labels to assistant"):
        made.count(batch)


def test_a_random_span_leaves_out_moves_to_tokens_that_see_one_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    numbers = [np.array(each, np.int32) for each in ([5, 6], [4, 5, 6, 7], [1, 2])]
    isolated, labels, prompt = ((each,) for each in numbers)
    members = BatchRecords(paths=(np.arange(10, 19),), isolated=isolated, labels=labels, prompt=prompt)
    (result,) = importlib.import_module("random_span")._moves(Batch(records=members))
    assert result.tolist() == [[11, 12], [12, 13], [17, 18]]


def test_an_answer_begins_at_its_own_records_first_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    answers = importlib.import_module("places").answers
    # The second record goes on where the first ends, and has its last turn labelled alone.
    records = [
        TokenizedRecord(np.arange(1, end, dtype=np.int32), np.array(labels, np.int32), np.zeros(0, np.int32), line=1)
        for end, labels in ((7, [2, 3, 4]), (10, [6, 7]))
    ]
    batch = Collator("separate", np.array([61], np.int32))([SampledRecord(each) for each in records])
    ends, tokens = answers(batch)
    ids = batch.input_ids.flatten()
    assert ids[ends].tolist() == [3, 7]
    assert [ids[each].tolist() for each in tokens] == [[4, 5, 6], [8, 9]]


def test_multi_token_prediction_is_annealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = importlib.import_module("multi_token").MultiToken()
    model = tiny.make_model("llama")
    batch = Collator("separate", np.array([61], np.int32), encoding="rows")(
        [SampledRecord(record) for record in random_records(3, vocabulary=60)]
    )
    result = [
        float(jepa_loss(model, batch, Objective([made]), context=Context(progress=progress)).loss.detach())
        for progress in (0.0, 0.4, 0.9)
    ]
    assert result[0] > result[1] > result[2] == 0


def pairs_of(wrong: int) -> list[dict[str, Any]]:
    """Records with a right and some wrong answers; a question and an answer occur twice."""
    questions, answers = ["a b", "c", "a b", "d d e"], ["5", "6 7", "8", "5"]
    return [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "views": [[question, answer], *([question, f"{answer} {place} no"] for place in range(wrong))],
        }
        for question, answer in zip(questions, answers, strict=True)
    ]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_hard_negatives_are_the_records_own(wrong: int, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = importlib.import_module("hard_negatives").HardNegatives(wrong=wrong, temperature=0.5)
    records = pairs_of(wrong)
    jepa = Jepa(tiny.make_model("llama"), tiny_tokenizer, JepaConfig(lbd=0, pairs="all"), objective=Objective([made]))
    pairs, size = jepa.embed_pairs(records), wrong + 1
    source, target = (torch.nn.functional.normalize(torch.as_tensor(side)) for side in (pairs.source, pairs.target))
    cosines = source @ target.T / 0.5
    # Records 0 and 2 ask the same, 0 and 3 have the same answer: those are no negatives of each other.
    right = {0: [1], 1: [0, 2, 3], 2: [1, 3], 3: [1, 2]}
    losses = []
    for record, others in right.items():
        wrong_pairs = [each * size + place for each in range(4) for place in range(1, size)]
        places = [record * size, *(other * size for other in others), *wrong_pairs]
        losses.append(-cosines[record * size][places].log_softmax(0)[0])
    batch = jepa.collate(records)
    assert made.count(batch) == 4
    assert jepa.loss(jepa.model, batch).parts[made.name].item() == pytest.approx(
        torch.stack(losses).mean().item(), rel=1e-5
    )


def test_a_record_with_another_number_of_wrong_answers_is_refused(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    made = importlib.import_module("hard_negatives").HardNegatives(wrong=2)
    jepa = Jepa(tiny.make_model("llama"), tiny_tokenizer, JepaConfig(lbd=0, pairs="all"), objective=Objective([made]))
    with pytest.raises(ValueError, match=r"views: expected a right pair of each record and 2 wrong, .*; set wrong to"):
        jepa.loss(jepa.model, jepa.collate(pairs_of(1)))
    first = Jepa(tiny.make_model("llama"), tiny_tokenizer, JepaConfig(lbd=0), objective=Objective([made]))
    with pytest.raises(ValueError, match="and pairs to all"):
        first.loss(first.model, first.collate(pairs_of(2)[:3]))


def test_hard_negatives_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_jsonl(tmp_path / "train.jsonl", pairs_of(1) * 3)
    flags = ["--train_file", tmp_path / "train.jsonl", "--model_name", "preset:tiny", "--output_dir", tmp_path / "run"]
    flags += ["--lbd", 0, "--pairs", "all", "--max_steps", 2, "--batch_size", 4, "--logging_steps", 1, "--use_cpu"]
    flags += ["--term", "hard_negatives:HardNegatives", "--term_args", '{"weight": 0.3}']
    assert main(["train", *map(str, flags)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = lines[0]["lm_loss"] + 0.3 * lines[0]["hard_negative_loss"]
    assert lines[0]["loss"] == pytest.approx(expected, rel=1e-5) and lines[0]["hard_negative_loss"] > 0


def test_matryoshka_is_the_mean_over_widths(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("matryoshka")
    made = module.MatryoshkaInfoNCE(temperature=0.5, matryoshka_dims=[3, 7])
    objective = Objective([made])
    jepa = Jepa(tiny.make_model("llama"), tiny_tokenizer, JepaConfig(lbd=0), objective=objective)
    records = pairs_of(0)
    pairs = jepa.embed_pairs(records)
    # Records 0 and 2 ask the same, 0 and 3 have the same answer: those are no negatives of each other.
    losses = []
    for dim in (3, 7):
        cosines = torch.cosine_similarity(
            torch.as_tensor(pairs.source)[:, None, :dim], torch.as_tensor(pairs.target)[None, :, :dim], dim=-1
        )
        for record, others in {0: [0, 1], 1: [1, 0, 2, 3], 2: [2, 1, 3], 3: [3, 1, 2]}.items():
            losses.append(-(cosines[record][others] / 0.5).log_softmax(0)[0])
    result = jepa.loss(jepa.model, jepa.collate(records)).parts[made.name]
    assert result.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    for dims in ([0, 3], [3, 10_000]):
        objective = Objective([module.MatryoshkaInfoNCE(matryoshka_dims=dims)])
        wrong = Jepa(jepa.model, tiny_tokenizer, JepaConfig(lbd=0), objective=objective)
        with pytest.raises(ValueError, match=r"matryoshka_dims: expected widths from 1 to \d+, got "):
            wrong.loss(wrong.model, wrong.collate(records))


def test_matryoshka_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_jsonl(tmp_path / "train.jsonl", pairs_of(0) * 3)
    flags = ["--train_file", tmp_path / "train.jsonl", "--model_name", "preset:tiny", "--output_dir", tmp_path / "run"]
    flags += ["--lbd", 0, "--max_steps", 2, "--batch_size", 4, "--logging_steps", 1, "--use_cpu"]
    flags += ["--term", "matryoshka:MatryoshkaInfoNCE"]
    assert main(["train", *map(str, flags)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["matryoshka_loss"] > 0
    jepa = Jepa.from_pretrained(tmp_path / "run")
    shares = dict(sys.modules["matryoshka"].hits_by_width(jepa, tmp_path / "train.jsonl", [5, 11]))
    assert all(0 <= share <= 1 for share in shares.values()) and list(shares) == [5, 11]
    # NumPy cuts at the width without a word.
    with pytest.raises(UserError, match=r"dims: expected widths from 1 to \d+, got 9999"):
        dict(sys.modules["matryoshka"].hits_by_width(jepa, tmp_path / "train.jsonl", [5, 9999]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", TERMS)
def test_from_the_command_line(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_jsonl(tmp_path / "train.jsonl", ({"messages": list(record.messages)} for record in tiny.records() * 3))
    flags = ["--train_file", tmp_path / "train.jsonl", "--model_name", "preset:tiny", "--output_dir", tmp_path / "run"]
    flags += ["--regular", "--max_steps", 2, "--batch_size", 4, "--logging_steps", 1, "--use_cpu"]
    flags += ["--term", f"{module}:{TERMS[module]}", "--term_args", '{"weight": 0.3}']
    assert main(["train", *map(str, flags)]) == 0
    name = sys.modules[module].__dict__[TERMS[module]].name
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if name in line] == [1, 2]
    assert lines[0]["loss"] == pytest.approx(lines[0]["lm_loss"] + 0.3 * lines[0][name], rel=1e-5)
    # Weights of a term are saved in a file of its own.
    assert not any("term_heads" in key for key in load_file(tmp_path / "run" / "model.safetensors"))
    assert (tmp_path / "run" / f"{name}.safetensors").is_file() == (module in ("nextlat", "nitp"))
