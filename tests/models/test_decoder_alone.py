"""What is saved of a decoder: the layers that are read, and only what ``AutoModel`` gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

import tiny
from stepjepa.models import decoder_alone
from stepjepa.models.decoder_alone import with_first_layers

IDS = torch.arange(5, 18)[None]


def state(decoder: Any, layer: int) -> torch.Tensor:
    with torch.no_grad():
        states = decoder(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
    result: torch.Tensor = states[layer]
    return result


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "opt"])
@pytest.mark.parametrize("layer", [0, 2, -2, 5, -1])
def test_the_folder_gives_the_hidden_states_of_the_model(architecture: str, layer: int, tmp_path: Path) -> None:
    model = tiny.make_model(architecture, num_hidden_layers=5)
    alone = with_first_layers(model, layer)
    alone.decoder.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(state(loaded, alone.layer), state(model.get_decoder(), layer))
    # A model around the decoder is saved whole.
    needed = 5 if architecture == "opt" else {0: 1, 2: 3, -2: 5, 5: 5, -1: 5}[layer]
    assert loaded.config.num_hidden_layers == needed


def test_it_shares_the_weights() -> None:
    model = tiny.make_model("llama", num_hidden_layers=5)
    weights = {value.data_ptr() for value in model.parameters()}
    assert {value.data_ptr() for value in with_first_layers(model, 2).decoder.parameters()} < weights


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_a_shorter_decoder_that_computes_something_else_is_not_saved(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained models have a first token whose states are a hundred times those of others; it alone was compared."""
    model = tiny.make_model("llama", num_hidden_layers=5)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= scale
    build = decoder_alone._built

    def other(*arguments: Any) -> Any:
        shorter = build(*arguments)
        shorter.layers[1] = shorter.layers[0]
        return shorter

    monkeypatch.setattr(decoder_alone, "_built", other)
    assert with_first_layers(model, 2) == (model.get_decoder(), 2)
