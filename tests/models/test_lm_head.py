"""LM head and cross-entropy in chunks against both at once, with states that several labels are read at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

import tiny
from slow_trees import logits_of
from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.config.lora import LoraSettings
from stepjepa.models import lm_head
from stepjepa.models.lm_head import LMHead, summed_cross_entropy
from stepjepa.models.loading import add_lora

STATES, LABELS, WIDTH, VOCABULARY = 13, 17, 7, 31
SCALED = ["gemma2_window", "granite", "granite_moe", "cohere"]


def drawn(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """States, a head, labels and the states that they are read at: some have two labels, some none."""
    generator = torch.Generator().manual_seed(5)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    states = torch.randn(STATES, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (LABELS,), generator=generator)
    rows = torch.randint(STATES, (LABELS,), generator=generator)
    # One token twice at a state, as equal records have it.
    labels[3], rows[3] = labels[8], rows[8]
    assert 1 < len(rows.unique()) < STATES
    return states, head.to(dtype), labels, rows


def of(head: nn.Linear) -> lm_head.Head:
    return head.weight, head.bias


def at_once(states: Tensor, head: nn.Linear, labels: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(head(states)[rows], labels, reduction="sum")


def gradients(loss: Tensor, states: Tensor, head: nn.Linear) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [states, *head.parameters()]))


def test_by_hand() -> None:
    head = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[math.log(3.0)], [0.0]]))
    states = torch.tensor([[1.0], [0.0]], requires_grad=True)
    # Probabilities (3/4, 1/4), read twice, and (1/2, 1/2).
    loss = summed_cross_entropy(states, of(head), torch.tensor([1, 0, 0]), torch.tensor([0, 1, 0]), chunk=1)
    assert loss.item() == pytest.approx(math.log(4) + math.log(2) + math.log(4 / 3))
    loss.backward()
    assert states.grad is not None
    assert states.grad.flatten().tolist() == pytest.approx([0.5 * math.log(3), -0.5 * math.log(3)])
    assert head.weight.grad is not None
    assert head.weight.grad.flatten().tolist() == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("chunk", [1, 5, STATES, None])
@pytest.mark.parametrize("bias", [False, True])
def test_in_chunks_as_at_once(chunk: int | None, bias: bool) -> None:
    states, head, labels, rows = drawn(bias=bias)
    loss, slow = (
        summed_cross_entropy(states, of(head), labels, rows, chunk),
        at_once(states, head, labels, rows),
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, slow, rtol=1e-6, atol=0)
    # Whatever the loss is multiplied by goes through.
    for found, wanted in zip(gradients(0.3 * loss, states, head), gradients(0.3 * slow, states, head), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("chunk", "autocast"), [(5, False), (STATES, True)])
def test_in_sixteen_bits(chunk: int, autocast: bool) -> None:
    """As near to single precision as what autograd makes of it, and in the dtypes of what is trained."""
    states, head, labels, rows = drawn(torch.float32 if autocast else torch.bfloat16)
    exact = nn.Linear(WIDTH, VOCABULARY, bias=False)
    exact.load_state_dict(head.state_dict())
    leaf = states.detach().float().requires_grad_()
    truth = at_once(leaf, exact, labels, rows)
    wanted = gradients(truth, leaf, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = summed_cross_entropy(states, of(head), labels, rows, chunk)
        logits = head(states)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, truth, rtol=2e-2, atol=0)
    found = gradients(loss, states, head)
    slow = gradients(F.cross_entropy(logits.float()[rows], labels, reduction="sum"), states, head)
    for ours, theirs, true in zip(found, slow, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - true).norm()) <= 1.5 * float((theirs - true).norm()) + 1e-6


def test_only_what_is_trained_gets_a_gradient() -> None:
    states, head, labels, rows = drawn()
    head.requires_grad_(False)
    (found,) = torch.autograd.grad(summed_cross_entropy(states, of(head), labels, rows, 5), [states])
    (wanted,) = torch.autograd.grad(at_once(states, head, labels, rows), [states])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not summed_cross_entropy(states, of(head), labels, rows).requires_grad
    loss = summed_cross_entropy(states, of(head), labels, rows)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward pass through the LM loss, got a second one"):
        loss.backward()


@pytest.mark.parametrize("chunk", [1, 5])
def test_tokens_that_are_impossible(chunk: int) -> None:
    """Logits of minus infinity are probabilities of 0: no NaN while they are not to be predicted, and infinite then."""
    states, head, labels, rows = drawn(bias=True)
    with torch.no_grad():
        labels[labels == 7] = 8
        head.bias[7] = -math.inf
    found, slow = (
        summed_cross_entropy(states, of(head), labels, rows, chunk),
        at_once(states, head, labels, rows),
    )
    torch.testing.assert_close(found, slow, rtol=1e-6, atol=0)
    for ours, wanted in zip(gradients(found, states, head), gradients(slow, states, head), strict=True):
        assert bool(torch.isfinite(ours).all())
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    labels[4] = 7
    assert summed_cross_entropy(states, of(head), labels, rows, chunk).item() == math.inf
    with torch.no_grad():
        states[int(rows[2]), 3] = math.nan
    assert math.isnan(summed_cross_entropy(states, of(head), labels, rows, chunk).item())


def test_logits_of_one_chunk_at_a_time(monkeypatch: Any) -> None:
    """Each state goes through the head once, however many labels are read at it."""
    states, head, labels, rows = drawn()
    sizes: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda rows, *rest: sizes.append(len(rows)) or linear(rows, *rest))
    summed_cross_entropy(states, of(head), labels, rows, 5)
    assert sizes == [5, 5, 3]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi", *SCALED])
def test_logits_are_the_models(architecture: str) -> None:
    """Also where it scales or caps them, and without leaving anything behind."""
    model = tiny.make_model(architecture, "eager")
    model.lm_head.train()
    assert LMHead(model).is_plain == (architecture not in SCALED)
    assert model.lm_head.training
    assert not model.training
    ids = torch.arange(3, 14)[None]
    wanted = model(input_ids=ids).logits[0]
    states = model.get_decoder()(input_ids=ids).last_hidden_state[0]
    head = LMHead(model)
    found = head.logits(states)
    tiny.assert_same(found, wanted)
    tiny.assert_same(head.logits(states.reshape(1, 11, -1))[0], wanted)
    tiny.assert_same(logits_of(model, states), wanted, what="the tests' own head")
    labels, rows = torch.arange(20, 35), torch.arange(15) % 11
    loss = head.cross_entropy(states, labels, rows)
    slow = F.cross_entropy(wanted[rows], labels, reduction="sum")
    tiny.assert_same(loss, slow)
    tiny.assert_same(head.cross_entropy(states, labels[:11]), F.cross_entropy(wanted, labels[:11], reduction="sum"))
    tiny.assert_same_gradients(tiny.gradients(model, loss), tiny.gradients(model, slow))
    assert torch.equal(model(input_ids=ids).logits[0], wanted)
    assert "forward" not in model.get_decoder().__dict__


@pytest.mark.parametrize("wrapped", ["adapter", "mixed precision"])
def test_wrappers_keep_the_chunks(wrapped: str, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head of which PEFT trains some rows, and outputs that are converted to float32, as Accelerate does."""
    model: Any = tiny.make_model("llama")
    if wrapped == "adapter":
        model = add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer)).eval()
    else:
        model = model.bfloat16()
        forward = model.forward
        model.forward = lambda *args, **kwargs: convert_to_fp32(forward(*args, **kwargs))
    calls: list[Any] = []
    monkeypatch.setattr(
        lm_head, "summed_cross_entropy", lambda *given: calls.append(given) or summed_cross_entropy(*given)
    )
    head, labels = LMHead(model), torch.arange(11, 18)
    states = torch.randn(7, 33, generator=torch.Generator().manual_seed(3)).to(model.dtype)
    loss = head.cross_entropy(states, labels)
    assert len(calls) == 1
    slow = F.cross_entropy(model.get_output_embeddings()(states).float(), labels, reduction="sum")
    torch.testing.assert_close(loss, slow, rtol=1e-5, atol=1e-5)
    tiny.assert_same_gradients(tiny.gradients(model, loss), tiny.gradients(model, slow))


def test_half_precision_keeps_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small gradients live on the scale that comes back with the loss, so they can't be taken before."""
    model, labels = tiny.make_model("llama"), torch.arange(11, 18)
    states = torch.randn(7, 33, generator=torch.Generator().manual_seed(3))
    calls: list[int] = []
    monkeypatch.setattr(lm_head, "summed_cross_entropy", lambda *_: calls.append(1) or torch.zeros(()))
    head = LMHead(model)
    head.cross_entropy(states, labels)
    assert calls == [1]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head.cross_entropy(states, labels)
    assert calls == [1]
    assert loss.item() == pytest.approx(
        F.cross_entropy(model.lm_head(states), labels, reduction="sum").item(), rel=1e-2
    )
