"""What a model can be trained on is found by running it: the verdict on architectures by name, and nothing changed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepjepa.models.shrink import shrink
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import tiny
from stepjepa.batch import mask
from stepjepa.models import probe
from stepjepa.models import shrink as shrunken
from stepjepa.models.probe import choose_encoding

ModelFactory = Callable[..., Any]

TREES = [
    "llama", "qwen2", "qwen3", "olmo2", "phi", "phi3", "mistral", "gpt2", "gpt_neox", "smollm3", "gemma2",
    "gemma3_text", "qwen3_moe", "gpt_oss",
]  # fmt: skip
# name -> changes to the default configuration, what the reason says
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {}, "attention interface"),
    "falcon_h1": ("falcon_h1", {}, "attention interface"),
    "qwen3_next": ("qwen3_next", {}, "attention interface"),
    "lfm2": ("lfm2", {"layer_types": ["full_attention", "conv"] * 16}, "other states than plain rows"),
    "gpt_neo": ("gpt_neo", {}, "attention interface"),
    "bloom": ("bloom", {}, "attention interface"),
    "mpt": ("mpt", {}, "attention interface"),
    "falcon_alibi": ("falcon", {"alibi": True}, "attention interface"),
    "llama4": ("llama4_text", {}, "other states than plain rows"),
    "deepseek_v32": ("deepseek_v32", {}, "other states than plain rows"),
    "glm_moe_dsa": ("glm_moe_dsa", {}, "other states than plain rows"),
    "roberta": ("roberta", {"is_decoder": True}, "other states than plain rows"),
    "xlm_roberta": ("xlm-roberta", {"is_decoder": True}, "other states than plain rows"),
    "camembert": ("camembert", {"is_decoder": True}, "other states than plain rows"),
    "data2vec_text": ("data2vec-text", {"is_decoder": True}, "other states than plain rows"),
    "xlm_causal": ("xlm", {"causal": True}, "attention interface"),
}
REFUSED = ["xlm", "cpmant", "roberta", "xlm-roberta", "camembert", "data2vec-text"]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test probes by itself."""
    monkeypatch.setattr(probe, "_by_configuration", {})


def of_full_size(family: str, **changes: Any) -> Any:
    """A model in the size of its default configuration, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **changes))


# -- The verdict by the copy alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TREES)
def test_attention_runs_trees(family: str) -> None:
    model = of_full_size(family)
    begin = time.process_time()
    encoding, reason = choose_encoding(model, "auto")
    # Two seconds is the promise; machines that run tests are slow.
    assert time.process_time() - begin < 8
    assert encoding == "tree"
    assert type(model).__name__ in reason
    assert choose_encoding(model, "tree") == ("tree", "as asked for")
    assert choose_encoding(model, "rows") == ("rows", "as asked for")


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


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_see_the_future_are_refused(family: str) -> None:
    model = of_full_size(family)
    for wanted in ("auto", "tree", "rows"):
        with pytest.raises(ValueError, match=r"later token changes earlier states.*choose a causal language model"):
            choose_encoding(model, wanted)


def test_encoders_are_refused() -> None:
    shape = {"hidden_size": 15, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
    bert = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=19, **shape))
    with pytest.raises(ValueError, match=r"not causal.*choose a causal language model"):
        choose_encoding(bert, "auto")
    with torch.device("meta"):
        t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5"))
    with pytest.raises(ValueError, match=r"encoder-decoder.*choose a causal language model"):
        choose_encoding(t5, "rows")


# -- Models with weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_tiny_models(name: str, tiny_model: ModelFactory) -> None:
    """Those that all other tests use, by the copy and by their own weights."""
    model = tiny_model(name, "eager" if name.startswith("gemma2") else "sdpa")
    assert choose_encoding(model, "auto")[0] == ("rows" if name in tiny.RECURRENT else "tree")


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "tree_sdpa"])
def test_nothing_is_changed(attention: str, tiny_model: ModelFactory) -> None:
    model = tiny_model("gemma3_window", "sdpa").train()
    model.set_attn_implementation(attention)
    model.get_decoder().layers[1].eval()
    config, weights = copy.deepcopy(model.config), copy.deepcopy(model.state_dict())
    training = [module.training for module in model.modules()]
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    assert choose_encoding(model, "auto")[0] == "tree"
    assert torch.equal(torch.rand(3), wanted)
    assert model.config.to_dict() == config.to_dict()
    assert {part.config._attn_implementation for part in (model, model.get_decoder())} == {attention}
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_copy_is_made_once_for_a_configuration(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(model: Any) -> Any:
        made.append(model)
        return shrink(model)

    monkeypatch.setattr(probe, "shrink", counted)
    first, second = tiny_model("llama"), tiny_model("llama", seed=1)
    for model in (first, second, first):
        choose_encoding(model, "auto")
    assert made == [first]
    choose_encoding(tiny_model("llama", sliding_window=7), "auto")
    assert len(made) == 2


def test_the_loaded_model_itself_is_run(tiny_model: ModelFactory) -> None:
    """A copy does not have what somebody has done to this one model."""
    model = tiny_model("llama")
    model.get_decoder().layers[1].self_attn.o_proj.register_forward_hook(lambda _, __, output: output.mean(1, True))
    with pytest.raises(ValueError, match="a later token changes earlier states"):
        choose_encoding(model, "auto")
    model = tiny_model("llama")
    # Positions from the place in the row: right for rows, wrong for trees.
    model.get_decoder().rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"position_ids": torch.arange(args[0].shape[1])[None]}), with_kwargs=True
    )
    encoding, reason = choose_encoding(model, "auto")
    assert encoding == "rows"
    assert "other states than plain rows" in reason


def test_half_precision_is_not_taken_for_a_fault(tiny_model: ModelFactory) -> None:
    wide = {"hidden_size": 48, "moe_intermediate_size": 32}
    for model in (tiny_model("llama"), tiny_model("gpt2"), tiny_model("qwen3_moe", **wide)):
        assert choose_encoding(model.bfloat16(), "auto")[0] == "tree"


def test_a_model_that_does_not_run_here_is_judged_by_its_copy(tiny_model: ModelFactory) -> None:
    # The product over experts in 16 bits wants widths of whole 16 bytes.
    model = tiny_model("qwen3_moe").bfloat16()
    with pytest.raises(RuntimeError, match="16 bytes"):
        model(torch.tensor([[5, 6, 7]]))
    assert choose_encoding(model, "auto")[0] == "tree"


def test_an_isolated_span_must_be_isolated(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = mask.sees
    monkeypatch.setattr(mask, "sees", lambda trees: rule(trees._replace(isolates=False)))
    encoding, reason = choose_encoding(tiny_model("llama"), "auto")
    assert encoding == "rows"
    assert "other states than plain rows" in reason


def test_padding_that_is_seen_is_refused(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    # Causal, and yet the width of a row matters.
    model.get_decoder().layers[0].mlp.register_forward_hook(lambda _, __, output: output * output.shape[1])
    with pytest.raises(ValueError, match="padded on the right"):
        choose_encoding(model, "rows")


def test_without_a_copy_the_model_itself_is_probed(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: Any) -> Any:
        raise ValueError("odd")

    monkeypatch.setattr(probe, "shrink", fail)
    # Also where the same configuration was seen without weights before.
    for model in (of_full_size("llama"), tiny_model("llama").to("meta")):
        encoding, reason = choose_encoding(model, "auto")
        assert encoding == "rows"
        assert "nothing was probed" in reason
    encoding, reason = choose_encoding(tiny_model("llama"), "auto")
    assert encoding == "tree"
    assert "the model itself was probed" in reason
    assert "odd" in reason
    assert choose_encoding(tiny_model("lfm2"), "auto")[0] == "rows"


# -- FlashAttention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_runs_concatenated_sequences(attention: str, tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = attention
    for wanted in ("auto", "rows"):
        assert choose_encoding(model, wanted) == (
            "concatenated",
            f"attention implementation '{attention}' is told where sequences begin",
        )
    with pytest.raises(ValueError, match="takes no mask of trees; use encoding 'rows'"):
        choose_encoding(model, "tree")
    assert model.config._attn_implementation == attention


def test_what_carries_past_attention_is_not_concatenated(tiny_model: ModelFactory) -> None:
    model = tiny_model("lfm2")
    model.config._attn_implementation = "flash_attention_2"
    assert choose_encoding(model, "auto")[0] == "rows"


def test_attention_must_hear_where_sequences_begin(monkeypatch: pytest.MonkeyPatch, tiny_model: ModelFactory) -> None:
    small = shrink(tiny_model("llama"))
    probe._check_bounds(small)
    for layer in small.get_decoder().layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "cu_seq_lens_q"}), with_kwargs=True
        )
    with pytest.raises(ValueError, match="not told where concatenated sequences begin"):
        probe._check_bounds(small)
    monkeypatch.setattr(probe, "shrink", lambda _: small)
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    encoding, reason = choose_encoding(model, "auto")
    assert encoding == "rows"
    assert "not told where" in reason


# -- The copy ----------------------------------------------------------------------------------------------------------


def test_the_copy_has_every_kind_of_layer_and_short_limits() -> None:
    small = shrink(of_full_size("gemma3_text", sliding_window=4096)).config
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.sliding_window == shrunken.LIMIT
    assert small.max_position_embeddings == shrunken.TABLE
    small = shrink(of_full_size("llama4_text")).config
    assert (small.attention_chunk_size, small.floor_scale) == (shrunken.LIMIT, shrunken.LIMIT)
    assert small.no_rope_layers == [1, 0]
    # Every eighth layer of Jamba is attention.
    assert shrink(of_full_size("jamba")).config.num_hidden_layers == 8


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next", "llama4_text"])
def test_the_copy_is_small(family: str) -> None:
    model = of_full_size(family)
    small = shrink(model)
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in small.parameters()} == {"cpu"}
    assert sum(parameter.numel() for parameter in small.parameters()) < 2 * 10**7
    assert model.config.vocab_size > shrunken.VOCABULARY == small.config.vocab_size
