"""``stepjepa verify`` passes what is right and fails what is broken."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from stepjepa.batch import segments
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.inspection import verification
from stepjepa.inspection.verification import Subject, verify
from stepjepa.models.encoded import Encoded
from stepjepa.models.loading import add_lora
from stepjepa.models.probe import probe
from stepjepa.models.varlen_attention import segment_by_segment
from stepjepa.objectives import packing

CONFIGS = {
    "regular": JepaConfig(mode="regular"),
    "separate": JepaConfig(mode="llm-jepa"),
    "branched": JepaConfig(mode="step-jepa", pairs="all"),
    "inplace": JepaConfig(mode="step-jepa", layout="inplace"),
    "rows": JepaConfig(mode="step-jepa", encoding="rows"),
    "in front": JepaConfig(mode="llm-jepa", layout="branched", front_pred=True),
    "head, layer, mean": JepaConfig(mode="llm-jepa", predictor_head="mlp", jepa_layer=1, pooling="mean"),
}


def results(model: Any, tokenizer: Any, config: JepaConfig, **options: Any) -> dict[str, Any]:
    return {result["name"]: result for result in verify(Subject(model, tokenizer, config, tiny.records(), **options))}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_right_passes(name: str, tiny_tokenizer: Any) -> None:
    actual = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS[name])
    assert len(actual) == len(verification.CHECKS)
    assert all(result["passed"] for result in actual.values()), actual


def test_lora(tiny_tokenizer: Any) -> None:
    def wrap(model: Any) -> Any:
        return add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer))

    actual = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["branched"], lora=wrap)
    assert all(result["passed"] for result in actual.values()), actual
    assert "2 predictor rows" in actual["one optimisation step"]["detail"]


@pytest.fixture
def tokens_cost_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in larger models: what records share is worth a mask, or calls of attention."""
    monkeypatch.setattr(packing, "NS_WEIGHT", 1e4)
    monkeypatch.setattr(packing, "NS_CALL", 0.0)
    for attention in ("sdpa", "eager"):
        probe(tiny.make_model("llama", attention))  # before a test breaks attention


@pytest.mark.usefixtures("tokens_cost_most")
def test_a_leaking_mask_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    def all_earlier(trees: Any, rule: Any = None) -> Any:
        rows, size = trees.start.shape
        return torch.ones(rows, 1, size, size, dtype=torch.bool).tril()

    monkeypatch.setattr("stepjepa.models.attention.dense", all_earlier)
    result = results(tiny.make_model("llama", "eager"), tiny_tokenizer, CONFIGS["branched"])
    assert not result["batch against separate passes"]["passed"]


@pytest.mark.usefixtures("tokens_cost_most")
def test_a_leaking_segment_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    def whole_path(call: Any, *_: Any) -> Any:
        return torch.zeros(call.shape.segments, 1, call.shape.queries, call.shape.keys)

    monkeypatch.setattr("stepjepa.models.segment_attention._call_mask", whole_path)
    result = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["branched"])
    assert not result["batch against separate passes"]["passed"]


@pytest.mark.usefixtures("tokens_cost_most")
def test_a_step_that_sees_what_is_before_it_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("stepjepa.batch.mask.Trees.isolates", False)
    result = results(tiny.make_model("llama", "eager"), tiny_tokenizer, CONFIGS["inplace"])
    assert not result["batch against separate passes"]["passed"]


@pytest.mark.usefixtures("tokens_cost_most")
def test_a_segment_that_sees_what_is_before_it_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    def not_isolated(before: Any, place: int, path: Any, shared: int, _start: Any) -> None:
        segments.add_segments(before, place, path, shared, None)

    monkeypatch.setattr("stepjepa.batch.pack.add_segments", not_isolated)
    result = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["inplace"])
    assert not result["batch against separate passes"]["passed"]


def test_a_variable_length_call_that_sees_too_little_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    model = tiny.make_model("llama", head_dim=24)  # FlashAttention takes multiples of 8
    assert probe(model).varlen  # before it is broken

    def without_first_keys(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        key = key.clone()
        key[:, :, 0] = 0.0
        return segment_by_segment(query, key, value, mask, **options)

    monkeypatch.setattr("stepjepa.models.varlen_attention.segment_by_segment", without_first_keys)
    result = results(model, tiny_tokenizer, CONFIGS["branched"])["batch against separate passes"]
    assert not result["passed"]
    assert result["detail"].index("in one call") > result["detail"].index("by segments") > 0


def test_rounding_in_sixteen_bits(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    """What a CUDA device checks, on the CPU; an error that is not that of rounding fails."""
    model = tiny.make_model("llama", head_dim=24)
    subject = Subject(model, tiny_tokenizer, CONFIGS["separate"], tiny.records())
    detail = verification.compare_rounding(subject)
    assert all(form in detail for form in ("under a mask", "by segments,", "in one call"))
    packed = verification._packed_states
    monkeypatch.setattr(verification, "_packed_states", lambda *arguments: packed(*arguments) * 1.1)
    with pytest.raises(ValueError, match="in plain passes"):
        verification.compare_rounding(subject)


def without_gradient(jepa_loss: Any) -> Any:
    def cut(model: Any, batch: Any, objective: Any) -> Any:
        losses = jepa_loss(model, batch, objective)
        return losses._replace(loss=losses.loss.detach() + 0 * model.get_output_embeddings().weight.sum())

    return cut


def at_other_positions(token_loss: Any) -> Any:
    def shift(encoded: Any, index: Any, token_ids: Any, rows: Any = None) -> Any:
        return token_loss(encoded, index + 1, token_ids, rows)

    return shift


@pytest.mark.parametrize(
    ("owner", "name", "broken", "check"),
    [
        (verification, "jepa_loss", without_gradient, "one optimisation step"),
        (Encoded, "token_loss", at_other_positions, "LM loss against transformers"),
    ],
)
def test_what_is_broken_fails(
    owner: Any, name: str, broken: Any, check: str, tiny_tokenizer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    result = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["branched"])
    assert not result[check]["passed"]
    assert result["data format"]["passed"]


def test_an_untrained_end_of_turn_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    subject = Subject(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["separate"], tiny.records())
    subject.tokenized = [replace(record, labels=record.labels[:-1]) for record in subject.tokenized]
    actual = {result["name"]: result for result in verify(subject)}
    assert "the last label is not the end of turn" in actual["end of turn is trained"]["detail"]
    assert not actual["end of turn is trained"]["passed"]


def test_command(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    assert main(["verify", "--step_jepa", "--max_records", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("PASS  ") for line in lines) == len(verification.CHECKS)
    monkeypatch.setattr(Encoded, "token_loss", at_other_positions(Encoded.token_loss))
    assert main(["verify", "--step_jepa", "--max_records", "5"]) == 1
    assert "\nFAIL  LM loss" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["mamba", "gpt2", "gemma3_window"])
def test_the_verdict_of_the_probe_is_printed(architecture: str, tiny_tokenizer: Any) -> None:
    actual = results(tiny.make_model(architecture), tiny_tokenizer, CONFIGS["separate"])
    assert all(result["passed"] for result in actual.values()), actual
    wanted = "rows" if architecture == "mamba" else "tree"
    assert actual["encoding by probe"]["detail"].startswith(f"{wanted}: ")
