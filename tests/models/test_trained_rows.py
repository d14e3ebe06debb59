"""Rows that an adapter trains give what PEFT's copy of the whole embedding gives, without that copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tiny
from stepjepa.config.lora import LoraSettings
from stepjepa.models.cross_entropy import summed_cross_entropy
from stepjepa.models.lm_head import LMHead
from stepjepa.models.loading import add_lora
from stepjepa.models.trained_rows import TrainedRows, replace_token_layers

OWN = [7, 11, 13]
IDS = torch.tensor([[7, 3, 11, 7, 5, 2, 17], [1, 13, 13, 4, 9, 7, 6]])


def adapted(name: str, *, head: bool = False) -> Any:
    """A model of which LoRA trains some rows, all of its weights moved away from where they start.

    With ``head`` also rows of an LM head that is not tied to the embedding.
    """
    rows: Any = {"embed_tokens": OWN, "lm_head": OWN[1:]} if head else OWN
    model: Any = add_lora(tiny.make_model(name, "eager", seed=3), LoraSettings(3), rows)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "head"), [("llama", False), ("qwen3", False), ("qwen3", True), ("gemma2_window", False)]
)
def test_logits_losses_and_gradients_are_pefts(name: str, head: bool) -> None:
    """Tied (Llama, Gemma, whose embedding is scaled) and untied, with and without rows of the head."""
    slow = adapted(name, head=head)
    fast = copy.deepcopy(slow)
    replace_token_layers(fast)
    result, wanted = fast(input_ids=IDS).logits, slow(input_ids=IDS).logits
    tiny.assert_same(result, wanted)
    labels, rows = torch.arange(20), torch.arange(20) % 14
    states = fast.get_base_model().get_decoder()(input_ids=IDS).last_hidden_state.flatten(0, 1)
    loss = LMHead(fast).cross_entropy(states, labels, rows)
    plain = F.cross_entropy(wanted.flatten(0, 1)[rows], labels, reduction="sum")
    tiny.assert_same(loss, plain)
    tiny.assert_same_gradients(tiny.gradients(fast, loss), tiny.gradients(slow, plain))
    assert fast.state_dict().keys() == slow.state_dict().keys()
    trained = sum("trainable_tokens_delta" in key for key, value in fast.named_parameters() if value.requires_grad)
    assert trained == 1 + head


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_head_in_chunks(chunk: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    states, weight = torch.randn(11, 5, generator=generator), torch.randn(19, 5, generator=generator)
    own = TrainedRows(torch.tensor(OWN), torch.randn(3, 5, generator=generator).to(dtype).requires_grad_())
    states, weight = states.to(dtype).requires_grad_(), weight.to(dtype)
    labels, rows = torch.tensor([7, 3, 11, 7, 18, 7]), torch.tensor([0, 0, 4, 10, 10, 10])
    result = summed_cross_entropy(states, (weight, None), labels, rows, chunk, trained=own)
    whole = weight.float().index_copy(0, own.ids, own.values.float())
    wanted = F.cross_entropy((states.float() @ whole.T)[rows], labels, reduction="sum")
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    tiny.assert_same(result, wanted, tolerance)
    for mine, other in zip(
        torch.autograd.grad(result, [states, own.values]),
        torch.autograd.grad(wanted, [states, own.values]),
        strict=True,
    ):
        assert mine.dtype == dtype
        tiny.assert_same(mine.float(), other.float(), tolerance)


def test_no_weight_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    model = adapted("llama")
    replace_token_layers(model)
    head = LMHead(model)

    def refuse(*_: Any) -> None:
        raise AssertionError("the whole weight was copied")

    monkeypatch.setattr(TrainableTokensLayer, "get_merged_weights", refuse)
    states = model.get_base_model().get_decoder()(input_ids=IDS).last_hidden_state.flatten(0, 1)
    head.cross_entropy(states, torch.arange(14)).backward()
    model(input_ids=IDS)
    with model.disable_adapter():
        model(input_ids=IDS)


def test_merged_and_disabled_adapters_are_pefts() -> None:
    slow = adapted("llama")
    fast = copy.deepcopy(slow)
    replace_token_layers(fast)
    with slow.disable_adapter(), fast.disable_adapter():
        assert torch.equal(fast(input_ids=IDS).logits, slow(input_ids=IDS).logits)
    wanted = slow(input_ids=IDS).logits
    tiny.assert_same(fast.merge_and_unload()(input_ids=IDS).logits, wanted)


def test_a_copy_has_rows_of_its_own() -> None:
    model = adapted("llama")
    replace_token_layers(model)
    other = copy.deepcopy(model)
    before = model(input_ids=IDS).logits
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "trainable_tokens" in name:
                parameter.add_(1.0)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert not torch.equal(other(input_ids=IDS).logits, before)
