"""What a model can be trained on is found by running a copy of it: the verdict on architectures by name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from stepjepa.models import probe, shrinking
from stepjepa.models.probe import choose_encoding
from stepjepa.models.shrinking import shrink

ModelFactory = Callable[..., Any]

TREES = [
    "llama", "qwen2", "qwen3", "olmo2", "phi", "phi3", "mistral", "gpt2", "gpt_neox", "smollm3", "gemma2",
    "gemma3_text", "qwen3_moe", "gpt_oss",
]  # fmt: skip
INTERFACE, TREE = "attention interface", "other hidden states for a prefix tree"
# name -> family, changes to its default configuration, what the reason says
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {}, INTERFACE),
    "falcon_h1": ("falcon_h1", {}, INTERFACE),
    "qwen3_next": ("qwen3_next", {}, INTERFACE),
    "gpt_neo": ("gpt_neo", {}, INTERFACE),
    "bloom": ("bloom", {}, INTERFACE),
    "falcon_alibi": ("falcon", {"alibi": True}, INTERFACE),
    "xlm_causal": ("xlm", {"causal": True}, INTERFACE),
    "lfm2": ("lfm2", {"layer_types": ["full_attention", "conv"] * 16}, TREE),
    "llama4": ("llama4_text", {}, TREE),
    "deepseek_v32": ("deepseek_v32", {}, TREE),
    "roberta": ("roberta", {"is_decoder": True}, TREE),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test probes by itself."""
    monkeypatch.setattr(probe, "_findings", {})


def of_full_size(family: str, **changes: Any) -> Any:
    """A model in the size of its default configuration, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **changes))


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", TREES)
def test_attention_runs_trees(family: str) -> None:
    model = of_full_size(family)
    begin = time.process_time()
    encoding, reason = choose_encoding(model, "auto")
    # Two seconds is the promise; machines that run tests are slow.
    assert time.process_time() - begin < 8
    assert encoding == "tree"
    assert type(model).__name__ in reason
    for wanted in ("tree", "rows"):
        assert choose_encoding(model, wanted) == (wanted, "as asked for")


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ROWS)
def test_others_run_rows(case: str) -> None:
    family, changes, why = ROWS[case]
    model = of_full_size(family, **changes)
    encoding, reason = choose_encoding(model, "auto")
    assert encoding == "rows"
    assert why in reason
    with pytest.raises(ValueError, match=f"{why}.*; use encoding 'rows'"):
        choose_encoding(model, "tree")
    assert choose_encoding(model, "rows") == ("rows", "as asked for")


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["xlm", "cpmant", "bert", "roberta", "t5"])
def test_models_that_see_the_future_are_refused(family: str) -> None:
    with torch.device("meta"):
        kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
        model = kind.from_config(AutoConfig.for_model(family))
    for wanted in ("auto", "tree", "rows"):
        with pytest.raises(ValueError, match=r"(later token changes|encoder-decoder).*choose a causal language model"):
            choose_encoding(model, wanted)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "tree_sdpa"])
def test_nothing_is_changed(attention: str, tiny_model: ModelFactory) -> None:
    model = tiny_model("gemma3_window", "sdpa").train()
    model.set_attn_implementation(attention)
    config, weights = copy.deepcopy(model.config), copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    assert choose_encoding(model, "auto")[0] == "tree"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == config.to_dict()
    assert {part.config._attn_implementation for part in (model, model.get_decoder())} == {attention}
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_padding_that_is_seen_is_refused(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    small = shrink(tiny_model("llama"))
    # Causal, and yet the width of a row matters.
    small.get_decoder().layers[0].mlp.register_forward_hook(lambda _, __, output: output * output.shape[1])
    monkeypatch.setattr(probe, "shrink", lambda _: small)
    with pytest.raises(ValueError, match="padded on the right"):
        choose_encoding(tiny_model("llama"), "rows")


def test_what_can_not_be_copied_runs_rows(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "MOST_PARAMETERS", 1000)
    encoding, reason = choose_encoding(tiny_model("llama"), "auto")
    assert encoding == "rows"
    assert "no small copy of LlamaForCausalLM could be probed" in reason


def test_a_model_that_is_being_built_is_probed(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy ran on the default device of the moment: meta, where the dry run of an adapter asks for the findings."""
    monkeypatch.setattr(probe, "_findings", {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("llama").config)
        choice = choose_encoding(model, "auto")
    assert choice.encoding == "tree", choice.reason


def test_attention_without_a_mask_runs_rows(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    encoding, reason = choose_encoding(model, "auto")
    assert encoding == "rows"
    assert "'flash_attention_2' does not take the mask of a prefix tree" in reason
    with pytest.raises(ValueError, match=r"does not take the mask of a prefix tree.*use encoding 'rows'"):
        choose_encoding(model, "tree")
