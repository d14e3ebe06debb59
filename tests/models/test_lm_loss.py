"""LM head and cross-entropy in chunks against both at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.grouping import GroupCollator
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models import lm_loss
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward_groups
from stepjepa.models.lm_loss import plain_head, summed_cross_entropy

LABELS, WIDTH, VOCABULARY = 13, 7, 31


def drawn(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(5)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    states = torch.randn(LABELS, WIDTH, generator=generator).to(dtype).requires_grad_()
    return states, head.to(dtype), torch.randint(VOCABULARY, (LABELS,), generator=generator)


def gradients(loss: Tensor, states: Tensor, head: nn.Linear) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [states, *head.parameters()]))


def test_by_hand() -> None:
    head = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[math.log(3.0)], [0.0]]))
    states = torch.tensor([[1.0], [0.0]], requires_grad=True)
    # Probabilities (3/4, 1/4) and (1/2, 1/2).
    loss = summed_cross_entropy(states, head, torch.tensor([1, 0]), chunk=1)
    assert loss.item() == pytest.approx(math.log(4) + math.log(2))
    loss.backward()
    assert states.grad is not None
    assert states.grad.flatten().tolist() == pytest.approx([0.75 * math.log(3), -0.5 * math.log(3)])
    assert head.weight.grad is not None
    assert head.weight.grad.flatten().tolist() == pytest.approx([0.75, -0.75])


@pytest.mark.parametrize("chunk", [1, 5, LABELS, 17, None])
@pytest.mark.parametrize("bias", [False, True])
def test_in_chunks_as_at_once(chunk: int | None, bias: bool) -> None:
    states, head, labels = drawn(bias=bias)
    loss = summed_cross_entropy(states, head, labels, chunk)
    slow = F.cross_entropy(head(states), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, slow, rtol=1e-6, atol=0)
    # Whatever the loss is multiplied by goes through.
    for found, wanted in zip(gradients(0.3 * loss, states, head), gradients(0.3 * slow, states, head), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [5, LABELS])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_sixteen_bits(chunk: int, autocast: bool) -> None:
    """As near to single precision as what autograd makes of it, and in the dtypes of what is trained."""
    states, head, labels = drawn(torch.float32 if autocast else torch.bfloat16)
    exact = nn.Linear(WIDTH, VOCABULARY, bias=False)
    exact.load_state_dict(head.state_dict())
    leaf = states.detach().float().requires_grad_()
    truth = F.cross_entropy(exact(leaf), labels, reduction="sum")
    wanted = gradients(truth, leaf, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = summed_cross_entropy(states, head, labels, chunk)
        logits = head(states)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, truth, rtol=2e-2, atol=0)
    found = gradients(loss, states, head)
    slow = gradients(F.cross_entropy(logits.float(), labels, reduction="sum"), states, head)
    for ours, theirs, true in zip(found, slow, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - true).norm()) <= 1.5 * float((theirs - true).norm()) + 1e-6


def test_only_what_is_trained_gets_a_gradient() -> None:
    states, head, labels = drawn()
    head.requires_grad_(False)
    (found,) = torch.autograd.grad(summed_cross_entropy(states, head, labels, 5), [states])
    (wanted,) = torch.autograd.grad(F.cross_entropy(head(states), labels, reduction="sum"), [states])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not summed_cross_entropy(states, head, labels).requires_grad
    loss = summed_cross_entropy(states, head, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward pass through the LM loss, got a second one"):
        loss.backward()


def test_nothing_to_predict() -> None:
    states, head, labels = drawn()
    loss = summed_cross_entropy(states[:0], head, labels[:0])
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss + 0 * states.sum(), states, head))


@pytest.mark.parametrize("chunk", [1, 5, LABELS])
def test_states_and_weights_of_zeros(chunk: int) -> None:
    """Equal logits: the logarithm of the vocabulary for each label, and gradients that autograd finds, too."""
    states, head, labels = drawn(bias=True)
    with torch.no_grad():
        states[3:9] = 0
        head.weight[11:] = 0
    found = summed_cross_entropy(states, head, labels, chunk)
    slow = F.cross_entropy(head(states), labels, reduction="sum")
    torch.testing.assert_close(found, slow, rtol=1e-6, atol=0)
    for ours, wanted in zip(gradients(found, states, head), gradients(slow, states, head), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    nothing = nn.Linear(WIDTH, VOCABULARY)
    nn.init.zeros_(nothing.weight)
    nn.init.zeros_(nothing.bias)
    assert summed_cross_entropy(states, nothing, labels, chunk).item() == pytest.approx(LABELS * math.log(VOCABULARY))


@pytest.mark.parametrize("chunk", [1, 5, LABELS])
def test_tokens_that_are_impossible(chunk: int) -> None:
    """Logits of minus infinity are probabilities of 0: no NaN while they are not to be predicted, and infinite then."""
    states, head, labels = drawn(bias=True)
    with torch.no_grad():
        labels[labels == 7] = 8
        head.bias[7] = -math.inf
    found = summed_cross_entropy(states, head, labels, chunk)
    slow = F.cross_entropy(head(states), labels, reduction="sum")
    torch.testing.assert_close(found, slow, rtol=1e-6, atol=0)
    for ours, wanted in zip(gradients(found, states, head), gradients(slow, states, head), strict=True):
        assert bool(torch.isfinite(ours).all())
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    labels[4] = 7
    assert summed_cross_entropy(states, head, labels, chunk).item() == math.inf
    with torch.no_grad():
        states[2, 3] = math.nan
    assert math.isnan(summed_cross_entropy(states, head, labels, chunk).item())


def test_logits_of_one_chunk_at_a_time(monkeypatch: Any) -> None:
    states, head, labels = drawn()
    sizes: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda rows, *rest: sizes.append(len(rows)) or linear(rows, *rest))
    summed_cross_entropy(states, head, labels, 5)
    assert sizes == [5, 5, 3]
    sizes.clear()
    monkeypatch.setattr(lm_loss, "FEWEST_LOGITS", 6 * VOCABULARY)
    summed_cross_entropy(states, head, labels)
    assert sizes == [6, 6, 1]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_heads_that_models_leave_alone(architecture: str) -> None:
    """Judged by what the model gives out: those that cap or scale their logits keep doing so."""
    attention = "eager" if architecture.startswith("gemma2") else "sdpa"
    model = tiny.make_model(architecture, attention).train()
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    random = torch.random.get_rng_state()
    assert (plain_head(model) is None) == bool(capped)
    assert all(module.training for module in model.modules())
    if not any(isinstance(module, nn.Dropout) for module in model.modules()):
        assert torch.equal(torch.random.get_rng_state(), random)


def test_of_several_passes(trained_tokenizer: Any) -> None:
    """The labels of all groups are summed in one place, and a model that keeps its logits comes to the same."""
    forests = ForestBuilder(trained_tokenizer, JepaConfig(mode="step-jepa")).build(tiny.records())
    model = tiny.make_model("llama")
    enable_forest(model)
    groups = GroupCollator(ForestCollator(0), 1)(forests)["groups"]
    assert len(groups) > 1
    fast, slow = forward_groups(model, groups), forward_groups(model, groups, keep_logits=True)
    assert fast.logits is None
    assert slow.logits is not None
    label_ids = torch.cat([group["label_ids"] for group in groups])
    assert slow.logits.shape == (len(label_ids), tiny.VOCABULARY)
    tiny.assert_same(slow.lm_loss, F.cross_entropy(slow.logits, label_ids, reduction="sum"))
    tiny.assert_same(fast.lm_loss, slow.lm_loss)
    tiny.assert_same(fast.source, slow.source)
    tiny.assert_same_gradients(tiny.gradients(model, fast.lm_loss), tiny.gradients(model, slow.lm_loss))
    head = model.get_output_embeddings()
    assert not head._forward_pre_hooks


def test_half_precision_is_left_to_the_model(trained_tokenizer: Any) -> None:
    """Its small gradients live on the scale that comes back with the loss."""
    forests = ForestBuilder(trained_tokenizer, JepaConfig(mode="regular")).build(tiny.records()[:1])
    model = tiny.make_model("llama")
    groups = [ForestCollator(0)(forests)]
    made: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda _module, _args, output: made.append(output.shape))
    forward_groups(model, groups)
    with torch.autocast("cpu", dtype=torch.float16):
        forward_groups(model, groups)
    labels = len(groups[0]["label_ids"])
    # The model was tried out first, with a single token.
    assert made == [(1, 1, tiny.VOCABULARY), (1, 0, tiny.VOCABULARY), (1, labels, tiny.VOCABULARY)]
