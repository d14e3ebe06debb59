"""Layers above those that are read do not run, and what is read is what the whole decoder gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import tiny
from stepjepa import Jepa, JepaConfig
from stepjepa.models.architecture import find_decoder, number_of_layers
from stepjepa.models.first_layers import running_up_to

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "gpt2": {"n_layer": 5},
    "gemma2_window": {},
    "qwen3_moe": {"num_hidden_layers": 5},
    "lfm2": {},
    "bert": {"num_hidden_layers": 5},
}
WHOLE = ["bert"]
"""Their layers are not in a list of the decoder itself."""
IDS = torch.arange(5, 18)[None]
TEXTS = ["What is 3+4+5?", "Name a colour", "Once more: 1+1"]


def make(architecture: str) -> Any:
    return tiny.make_model(architecture, "eager", **SHAPES[architecture])


def states(model: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        result: tuple[Tensor, ...] = find_decoder(model)(
            input_ids=IDS, use_cache=False, output_hidden_states=True
        ).hidden_states
    return result


def layers_of(model: Any) -> Sequence[nn.Module]:
    """All layers of a decoder that is whole."""
    count = number_of_layers(model)
    lists = [part for part in find_decoder(model).modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    return [*lists[0]]


def run_by(act: Callable[[], object], layers: Sequence[nn.Module]) -> list[int]:
    """The numbers of the layers that run in a call."""
    run: set[int] = set()

    def note(number: int) -> Callable[..., None]:
        return lambda *_: run.add(number)

    handles = [layer.register_forward_pre_hook(note(number)) for number, layer in enumerate(layers)]
    act()
    for handle in handles:
        handle.remove()
    return sorted(run)


@pytest.mark.parametrize("architecture", SHAPES)
def test_what_is_read_is_what_the_whole_decoder_gives(architecture: str) -> None:
    whole = states(make(architecture))
    last = len(whole) - 1
    for layer in range(-last - 1, last + 1):
        model = make(architecture)  # has never returned its hidden states
        place, layers = layer % (last + 1), layers_of(model)
        with running_up_to(model, [0, layer]) as indices:
            assert torch.equal(states(model)[indices[0]], whole[0])
            assert torch.equal(states(model)[indices[1]], whole[place])
            needed = last if architecture in WHOLE else min(place + 1, last)
            assert run_by(lambda read=model: states(read), layers) == [*range(needed)]
        # Afterwards all layers run again and give their states.
        after = states(model)
        assert len(after) == last + 1
        assert all(torch.equal(*both) for both in zip(after, whole, strict=True))


def test_all_layers_are_back_after_an_error() -> None:
    model = make("llama")
    with pytest.raises(RuntimeError, match="stop"), running_up_to(model, [1]):
        raise RuntimeError("stop")
    assert len(states(model)) == 6


def test_a_layer_that_the_model_lacks_is_left_to_who_reads_it() -> None:
    model = make("llama")
    for lacking in (6, -7):
        with running_up_to(model, [1, lacking]) as indices:
            assert indices == [1, lacking]
            assert len(states(model)) == 6


def test_a_decoder_with_fewer_states_than_layers_runs_whole() -> None:
    """Without an image a layer of cross-attention gives no state, so an index is not the number of a layer."""
    sizes = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 28}
    config = MllamaTextConfig(
        vocab_size=tiny.VOCABULARY, num_hidden_layers=5, cross_attention_layers=[1], pad_token_id=0, **sizes
    )
    model = MllamaForCausalLM(config).eval()
    whole = states(model)
    assert len(whole) == 5
    for layer in (2, -3):
        with running_up_to(model, [layer]) as indices:
            assert torch.equal(states(model)[indices[0]], whole[2])
            assert len(states(model)) == 5


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_texts_are_embedded_by_the_layers_below_the_readout(architecture: str, tiny_tokenizer: Any) -> None:
    jepa = Jepa(make(architecture), tiny_tokenizer, JepaConfig(layout="separate", predictors=1))
    untouched = Jepa(make(architecture), tiny_tokenizer, JepaConfig(layout="separate", predictors=1))
    layers = layers_of(jepa.model)
    embedded = [jepa.embed(TEXTS, layer=2)]  # the first time one token goes through all layers
    for layer in (2, -4):
        run = run_by(lambda at=layer: embedded.append(jepa.embed(TEXTS, layer=at)), layers)
        assert run == [0, 1, 2]
    assert all((vectors == embedded[0]).all() for vectors in embedded)
    # All layers are there again.
    assert run_by(lambda: jepa.embed(TEXTS), layers) == [0, 1, 2, 3, 4]
    assert jepa.answer("Name a colour", max_new_tokens=7) == untouched.answer("Name a colour", max_new_tokens=7)


def test_threads_that_share_a_model_take_turns(tiny_tokenizer: Any) -> None:
    """A server answers requests in threads: one ran the layers that another one had left, and saw its hooks."""
    jepa = Jepa(make("llama"), tiny_tokenizer, JepaConfig(layout="separate", predictors=1))
    calls: list[Callable[[], Any]] = [
        lambda: jepa.embed(TEXTS, layer=1).tolist(),
        lambda: jepa.embed(TEXTS[:2]).tolist(),
        lambda: jepa.answer(TEXTS[1], max_new_tokens=7),
    ]
    alone = [call() for call in calls]
    with ThreadPoolExecutor(3) as threads:
        together = [*threads.map(lambda number: calls[number % 3](), range(30))]
    assert together == alone * 10
