"""Embeddings of views: where training reads them, and what separate plain passes give."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.evaluation.embeddings import ViewEmbeddings, similarity_config
from stepjepa.evaluation.run import pair_embedder
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.store.record import trained_objective

STEPS = {"mode": "step-jepa", "pairs": "all"}


def embed(model: Any, tokenizer: Any, config: JepaConfig, **options: Any) -> ViewEmbeddings:
    return pair_embedder(model, tokenizer, config, **options)(tiny.records())


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"mode": "llm-jepa", "predictors": 2}),
        ("gpt2", {"mode": "llm-jepa", "layout": "branched", "predictors": 1}),
        ("gemma3_window", {**STEPS, "predictors": 3}),
        ("mistral_window", {**STEPS, "predictors": 0}),
        ("llama", {"mode": "llm-jepa", "predictors": 2, "jepa_layer": 1, "pooling": "mean"}),
        ("gpt2", {**STEPS, "predictors": 1, "jepa_layer": -2, "reverse_pred": True}),
        ("llama", {"mode": "llm-jepa", "predictors": 1, "jepa_layer": 0, "front_pred": True}),
    ],
    ids=str,
)
def test_views_are_read_as_in_training(
    architecture: str, settings: dict[str, Any], tiny_model: Any, trained_tokenizer: Any
) -> None:
    config = JepaConfig(**settings)
    result = embed(tiny_model(architecture), trained_tokenizer, config)
    model = tiny_model(architecture)
    enable_trees(model)
    with torch.no_grad():
        outputs = jepa_loss(model, tiny.batch_of(trained_tokenizer, config), Objective.from_config(config))
    assert len(result.record) == len(outputs.source) > 2
    tiny.assert_same(torch.from_numpy(result.source), outputs.source)
    tiny.assert_same(torch.from_numpy(result.target), outputs.target)


class Slow:
    """One plain pass for each view; views found by the characters of the rendered chat."""

    def __init__(self, model: Any, tokenizer: Any, config: JepaConfig) -> None:
        self.model, self.tokenizer = model, tokenizer
        assert config.predictors is not None
        self.predictors = predictor_ids(tokenizer, config.predictors)

    def read(self, chat: Any, content: str, span: tuple[int, int], alone: bool) -> np.ndarray:
        """A span of a message's characters: after all that precedes it in the chat, with predictors, or alone."""
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        both = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        place, offsets = text.rindex(content), enumerate(both["offset_mapping"])
        inside = [index for index, (begin, _) in offsets if place + span[0] <= begin < place + span[1]]
        ids = both["input_ids"]
        chosen = ids[inside[0] : inside[-1] + 1] if alone else [*ids[: inside[-1] + 1], *self.predictors]
        with torch.no_grad():
            output = self.model(input_ids=torch.tensor([chosen]), output_hidden_states=True, use_cache=False)
        return output.hidden_states[-1][0, -1].numpy()

    def pairs(self, record: Record) -> list[tuple[np.ndarray, np.ndarray]]:
        chat, answer, spans, beginning = list(record.messages), record.answer, [], 0
        for step in answer.split("\n\n"):
            spans.append((beginning, min(beginning + len(step) + 2, len(answer))))
            beginning = spans[-1][1]
        return [(self.read(chat, answer, a, False), self.read(chat, answer, b, True)) for a, b in pairwise(spans)]


@pytest.mark.parametrize("architecture", ["llama", *tiny.RECURRENT])
def test_embeddings_are_those_of_separate_passes(architecture: str, tiny_model: Any, trained_tokenizer: Any) -> None:
    model, config = tiny_model(architecture), JepaConfig(**STEPS, predictors=2)
    slow = Slow(model, trained_tokenizer, config)
    expected = [pair for record in tiny.records() for pair in slow.pairs(record)]
    result = embed(model, trained_tokenizer, config)
    assert len(result.record) == len(expected) > 2
    for fast, each in zip((result.source, result.target), zip(*expected, strict=True), strict=True):
        tiny.assert_same(torch.from_numpy(fast), torch.from_numpy(np.stack(each)), 5e-5)


def test_batches_make_no_difference(tiny_model: Any, trained_tokenizer: Any) -> None:
    model, config = tiny_model("llama"), JepaConfig(**STEPS, predictors=2)
    one, many = (embed(model, trained_tokenizer, config, batch_size=size) for size in (1, 16))
    tiny.assert_same(torch.from_numpy(one.source), torch.from_numpy(many.source))
    assert one.record.tolist() == many.record.tolist() == [0, 0, 0, 1]
    assert one.pair.tolist() == [1, 2, 3, 1]


def test_records_without_embeddings_leave_the_others_where_they_are(tiny_model: Any, trained_tokenizer: Any) -> None:
    model, config = tiny_model("llama"), JepaConfig(**STEPS, over_length="skip", max_length=80)
    first, second, single = tiny.records()
    long = tiny.make_record("Add.", "x " * 200, "a\n\nb", line=1)
    # All of one line number: nothing but the order tells them apart.
    records = [long, single, second, long, first, single]
    result = pair_embedder(model, trained_tokenizer, config)(records)
    assert result.record.tolist() == [2, 4, 4, 4]
    alone = pair_embedder(model, trained_tokenizer, config)([second])
    tiny.assert_same(torch.from_numpy(result.source[:1]), torch.from_numpy(alone.source))


def test_what_can_not_be_embedded(tiny_model: Any, trained_tokenizer: Any) -> None:
    model, records = tiny_model("llama"), tiny.records()
    config = JepaConfig(mode="llm-jepa", predictors=1)
    for layer in (3, -4):
        with pytest.raises(UserError, match=rf"layer: expected -3 to 2 for a model of 2 layers, got {layer}"):
            pair_embedder(model, trained_tokenizer, replace(config, jepa_layer=layer))(records)
    with pytest.raises(UserError, match=r"memory.jsonl: none of 1 records has a pair of step-jepa views"):
        pair_embedder(model, trained_tokenizer, JepaConfig(**STEPS))(records[2:])
    model.get_input_embeddings().weight.data[:] = float("nan")
    with pytest.raises(UserError, match=r"not finite.*`dtype float32`"):
        pair_embedder(model, trained_tokenizer, config)(records)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any, trained_tokenizer: Any) -> dict[str, Path]:
    """A regular and a Step-JEPA run on the same records, each evaluated on them."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.make_model("llama").save_pretrained(folder / "base")
    trained_tokenizer.save_pretrained(folder / "base")
    write_jsonl(folder / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    shared = ["--train_file", folder / "data.jsonl", "--model_name", folder / "base", "--use_cpu", "--max_steps", "2"]
    result = {}
    for name, flags in {"regular": ["--regular"], "step": ["--step_jepa", "--layout", "inplace"]}.items():
        run = folder / name
        assert main(list(map(str, ["train", *shared, "--output_dir", run, "--save_strategy", "no", *flags]))) == 0
        evaluate = ["evaluate", "--model_path", run, "--test_file", folder / "data.jsonl", "--task", "generic"]
        evaluate += ["--output_file", run / "test.jsonl", "--max_new_tokens", 5, "--similarity"]
        evaluate += ["step-jepa"] if name == "regular" else []  # else the views of training
        assert main(list(map(str, evaluate))) == 0
        result[name] = run
    return result


def test_a_model_is_read_where_it_was_trained_to_be_read(runs: dict[str, Path], tmp_path: Path) -> None:
    step = similarity_config(runs["step"], "step-jepa")
    assert (step.mode, step.layout, step.predictors) == ("step-jepa", "branched", 2)
    assert similarity_config(runs["regular"], "step-jepa").predictors == 0
    other = similarity_config(runs["step"], "llm-jepa")
    assert (other.mode, other.layout, other.predictors) == ("llm-jepa", "separate", 0)
    with pytest.raises(UserError, match="no run folder"):
        similarity_config(tmp_path, "step-jepa")
    # A checkpoint is read as the run that it lies in, a folder of any other name is not.
    for name, known in (("checkpoint-2", True), ("other", False)):
        (runs["step"] / name).mkdir()
        objective = trained_objective(runs["step"] / name)
        assert (objective is not None) == known
    assert similarity_config(runs["step"] / "checkpoint-2", "step-jepa") == step


def test_right_and_wrong_answers_are_told_apart(runs: dict[str, Path]) -> None:
    lines = [json.loads(line) for line in (runs["step"] / "test.jsonl").read_text().splitlines()]
    summary = json.loads((runs["step"] / "test.summary.json").read_text())
    result = summary["similarity"]
    assert summary["settings"]["similarity"] == "step-jepa"
    measured = [line["similarity"] for line in lines if line["similarity"] is not None]
    # Tiny models know nothing, so all that has a pair of steps is on one side.
    assert {line["error"] is None for line in lines} == {False}
    assert len(measured) == result["wrong"]["n"] == result["pairs"] < len(lines)
    assert result["wrong"]["mean"] == pytest.approx(sum(measured) / len(measured))
    assert result["wrong"]["mean"] == pytest.approx(result["matched_similarity"], abs=1e-6)
    assert result["right"] == {"n": 0}
