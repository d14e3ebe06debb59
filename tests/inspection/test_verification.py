"""``stepjepa verify`` passes what is right and fails what is broken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiny
from stepjepa.cli import main
from stepjepa.config import JepaConfig
from stepjepa.inspection import verification
from stepjepa.inspection.verification import Result, Subject, verify
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.text.predictors import all_predictor_ids

CONFIGS = {
    "regular": JepaConfig(mode="regular"),
    "separate": JepaConfig(mode="llm-jepa"),
    "branched": JepaConfig(mode="step-jepa", pairs="all"),
    "inplace": JepaConfig(mode="step-jepa", layout="inplace"),
    "rows": JepaConfig(mode="step-jepa", encoding="rows"),
    "reversed": JepaConfig(mode="step-jepa", reverse_pred=True),
    "in front": JepaConfig(mode="llm-jepa", layout="branched", front_pred=True),
}


def results(model: Any, tokenizer: Any, config: JepaConfig, **options: Any) -> dict[str, Result]:
    return {result.name: result for result in verify(Subject(model, tokenizer, config, tiny.records(), **options))}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_right_passes(name: str, tiny_tokenizer: Any) -> None:
    found = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS[name])
    assert len(found) == len(verification.CHECKS)
    assert all(result.passed for result in found.values()), found


def test_lora(tiny_tokenizer: Any) -> None:
    def wrap(model: Any) -> Any:
        return add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer))

    found = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["branched"], lora=wrap)
    assert all(result.passed for result in found.values()), found
    assert "2 predictor rows" in found["one optimisation step"].detail


def leaking_mask(monkeypatch: Any) -> None:
    def all_earlier(visibility: Any) -> Any:
        size = visibility.segment_ids.shape[1]
        return torch.ones(len(visibility.segment_ids), size, size, dtype=torch.bool).tril()

    monkeypatch.setattr(verification, "visible", all_earlier)
    monkeypatch.setattr("stepjepa.models.attention.visible", all_earlier)


def test_a_leaking_mask_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    leaking_mask(monkeypatch)
    found = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["branched"])
    assert not found["mask against double loop"].passed
    assert not found["batch against separate passes"].passed


BREAKS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a lost gradient": (
        "one optimisation step",
        lambda patch: patch.setattr(verification, "forward", detached(verification.forward)),
    ),
    "a wrong loss": (
        "alignment losses by hand",
        lambda patch: patch.setattr(verification, "L2", lambda: lambda source, target: (source - target).sum()),
    ),
}


def detached(forward: Any) -> Any:
    def cut(model: Any, batch: Any) -> Any:
        outputs = forward(model, batch)
        blind = outputs.lm_loss.detach() + 0 * model.get_output_embeddings().weight.sum()
        return outputs._replace(lm_loss=blind, source=outputs.source.detach(), target=outputs.target.detach())

    return cut


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_fails(name: str, tiny_tokenizer: Any, monkeypatch: Any) -> None:
    check, break_it = BREAKS[name]
    break_it(monkeypatch)
    found = results(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["branched"])
    assert not found[check].passed
    assert found["data format"].passed


def test_an_untrained_end_of_turn_fails(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    subject = Subject(tiny.make_model("llama"), tiny_tokenizer, CONFIGS["separate"], tiny.records())
    for forest in subject.forests:
        last = (forest.shift_labels != -100).nonzero()[0][-1]
        forest.shift_labels[last] = -100
    found = {result.name: result for result in verify(subject)}
    assert "the last label is not the end of turn" in found["end of turn is trained"].detail
    assert not found["end of turn is trained"].passed


def test_command(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    assert main(["verify", "--step_jepa", "--max_records", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("PASS  ") for line in lines) == len(verification.CHECKS)
    leaking_mask(monkeypatch)
    assert main(["verify", "--step_jepa", "--max_records", "5"]) == 1
    assert any(line.startswith("FAIL  mask") for line in capsys.readouterr().out.splitlines())
