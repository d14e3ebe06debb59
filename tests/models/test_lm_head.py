"""LM head and cross-entropy in chunks against both at once, with states that several labels are read at."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

import tiny
from slow_trees import logits_of
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.models import lm_head
from stepjepa.models.cross_entropy import Head, states_at_once, summed_cross_entropy
from stepjepa.models.lm_head import LMHead
from stepjepa.models.loading import add_lora
from stepjepa.training.trainer import JepaTrainer

STATES, LABELS, WIDTH, VOCABULARY = 13, 17, 7, 31
Change = nn.Module | None
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


def of(head: nn.Linear) -> Head:
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
    for result, wanted in zip(gradients(0.3 * loss, states, head), gradients(0.3 * slow, states, head), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)


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
    result = gradients(loss, states, head)
    slow = gradients(F.cross_entropy(logits.float()[rows], labels, reduction="sum"), states, head)
    for ours, theirs, true in zip(result, slow, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - true).norm()) <= 1.5 * float((theirs - true).norm()) + 1e-6


def test_many_chunks_in_sixteen_bits_are_added_up_in_single_precision() -> None:
    """One contribution after the other, to a sum in bfloat16, would come to a halt at 256 of them."""
    count = 1031
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    states, none = torch.ones(count, 1, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.long)
    summed_cross_entropy(states, (weight, None), none, torch.arange(count), chunk=1).backward()
    # Each of both tokens has one half of the probability.
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([-count / 2, count / 2], rel=0.01)


def test_only_what_is_trained_gets_a_gradient() -> None:
    states, head, labels, rows = drawn()
    head.requires_grad_(False)
    (result,) = torch.autograd.grad(summed_cross_entropy(states, of(head), labels, rows, 5), [states])
    (wanted,) = torch.autograd.grad(at_once(states, head, labels, rows), [states])
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not summed_cross_entropy(states, of(head), labels, rows).requires_grad
    loss = summed_cross_entropy(states, of(head), labels, rows)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward pass through the LM loss, got a second one"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    """Gradients are computed in the forward pass, so that those of a penalty on them would be left out, silently."""
    states, head, labels, rows = drawn()
    loss = summed_cross_entropy(states, of(head), labels, rows)
    with pytest.raises(RuntimeError, match="create_graph: the LM loss has no second derivative"):
        torch.autograd.grad(loss, [states], create_graph=True)


@pytest.mark.parametrize("chunk", [1, 5])
def test_tokens_that_are_impossible(chunk: int) -> None:
    """Logits of minus infinity are probabilities of 0: no NaN while they are not to be predicted, and infinite then."""
    states, head, labels, rows = drawn(bias=True)
    with torch.no_grad():
        labels[labels == 7] = 8
        head.bias[7] = -math.inf
    result, slow = (
        summed_cross_entropy(states, of(head), labels, rows, chunk),
        at_once(states, head, labels, rows),
    )
    torch.testing.assert_close(result, slow, rtol=1e-6, atol=0)
    for ours, wanted in zip(gradients(result, states, head), gradients(slow, states, head), strict=True):
        assert bool(torch.isfinite(ours).all())
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    labels[4] = 7
    assert summed_cross_entropy(states, of(head), labels, rows, chunk).item() == math.inf
    with torch.no_grad():
        states[int(rows[2]), 3] = math.nan
    assert math.isnan(summed_cross_entropy(states, of(head), labels, rows, chunk).item())


@pytest.mark.parametrize(
    ("vocabulary", "width", "on_gpu", "states"),
    [
        (1_000, 64, False, 1_048),  # 2^20 logits
        (151_936, 896, False, 224),  # a quarter of the width
        (151_936, 896, True, 883),  # 2^27 logits
        (2**29, 3, True, 1),
    ],
)
def test_states_in_a_chunk(vocabulary: int, width: int, on_gpu: bool, states: int) -> None:
    assert states_at_once(vocabulary, width, on_gpu=on_gpu) == states


def test_logits_of_one_chunk_at_a_time(monkeypatch: Any) -> None:
    """Each state goes through the head once, however many labels are read at it."""
    states, head, labels, rows = drawn()
    sizes: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda rows, *rest: sizes.append(len(rows)) or linear(rows, *rest))
    summed_cross_entropy(states, of(head), labels, rows, 5)
    assert sizes == [5, 5, 3]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi", *SCALED, *tiny.LAYERS_BEFORE_HEAD])
def test_logits_are_the_models(architecture: str) -> None:
    """Also where it scales or caps them, or changes the states before; and without leaving anything behind."""
    model = tiny.make_model(architecture, "eager")
    model.get_output_embeddings().train()
    before, after = architecture in tiny.LAYERS_BEFORE_HEAD, architecture in SCALED
    assert LMHead(model).around == (before, after)
    assert (LMHead(model).describe() is not None) == before
    assert model.get_output_embeddings().training
    assert not model.training
    assert not model.get_decoder().training
    ids = torch.arange(3, 14)[None]
    wanted = model(input_ids=ids).logits[0]
    states = model.get_decoder()(input_ids=ids).last_hidden_state[0]
    head = LMHead(model)
    result = head.logits(states)
    tiny.assert_same(result, wanted)
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
        lm_head,
        "summed_cross_entropy",
        lambda *given, **more: calls.append(given) or summed_cross_entropy(*given, **more),
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
    monkeypatch.setattr(lm_head, "summed_cross_entropy", lambda *_, **__: calls.append(1) or torch.zeros(()))
    head = LMHead(model)
    head.cross_entropy(states, labels)
    assert calls == [1]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head.cross_entropy(states, labels)
    assert calls == [1]
    assert loss.item() == pytest.approx(
        F.cross_entropy(model.lm_head(states), labels, reduction="sum").item(), rel=1e-2
    )


# -- what lies between decoder and LM head -----------------------------------------------------------------------------


class OwnHead(LlamaForCausalLM):
    """A Llama that does something with the states before its LM head, or with the logits behind it."""

    def __init__(self, config: LlamaConfig, before: Change = None, after: Change = None, heads: int = 1) -> None:
        super().__init__(config)
        self.before, self.after, self.heads = before or nn.Identity(), after or nn.Identity(), heads

    def forward(self, input_ids: Any, **kwargs: Any) -> CausalLMOutputWithPast:  # type: ignore[override]
        kwargs.pop("labels", None)
        output = self.model(input_ids=input_ids, **kwargs)
        states = self.before(output.last_hidden_state)
        logits = torch.stack([self.lm_head(states) for _ in range(self.heads)]).mean(0) if self.heads else states
        return CausalLMOutputWithPast(logits=self.after(logits))


def own_head(**parts: Any) -> OwnHead:
    shape = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 7, "num_hidden_layers": 1}
    return OwnHead(LlamaConfig(vocab_size=23, **shape), **parts).eval()


class Halved(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states / 2


class Mean(nn.Module):
    """Of all positions so far."""

    def forward(self, states: Tensor) -> Tensor:
        return states.cumsum(1) / torch.arange(1, states.shape[1] + 1)[:, None]


@pytest.mark.parametrize(
    ("parts", "around"),
    [
        ({}, (False, False)),
        ({"before": Halved()}, (True, False)),
        ({"after": Halved()}, (False, True)),
        ({"before": nn.LayerNorm(12), "after": nn.Hardtanh(-9.0, 9.0)}, (True, True)),
        ({"before": nn.Dropout(0.3)}, (True, False)),
        ({"after": nn.Dropout(0.3)}, (False, True)),
    ],
)
def test_what_lies_around_the_head_is_seen(parts: dict[str, nn.Module], around: tuple[bool, bool]) -> None:
    """Also dropout, which changes nothing in evaluation, and where weights of zero make everything equal."""
    state = torch.random.get_rng_state()
    assert LMHead(own_head(**parts)).around == around
    empty = own_head(**parts)
    nn.init.zeros_(empty.lm_head.weight)
    nn.init.zeros_(empty.model.norm.weight)
    assert LMHead(empty).around == around
    torch.random.set_rng_state(state)
    model = own_head(**parts)
    after = torch.random.get_rng_state()
    LMHead(model)
    assert torch.equal(torch.random.get_rng_state(), after), "a run draws the same whatever was tried"


def test_dropout_before_the_head_is_a_part_of_the_loss() -> None:
    model, labels = own_head(before=nn.Dropout(0.5)), torch.arange(11)
    states, head = torch.randn(11, 12, generator=torch.Generator().manual_seed(1)), LMHead(model)
    plain = F.cross_entropy(model.lm_head(states), labels, reduction="sum")
    tiny.assert_same(head.cross_entropy(states, labels), plain)
    model.train()
    torch.manual_seed(2)
    dropped = F.cross_entropy(model.lm_head(model.before(states[None])[0]), labels, reduction="sum")
    torch.manual_seed(2)
    tiny.assert_same(head.cross_entropy(states, labels), dropped)
    assert abs(float(dropped.detach() - plain.detach())) > 1e-2


def test_models_whose_loss_could_not_be_theirs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of OwnHead at a position depend on more than .*; choose another"):
        LMHead(own_head(before=Mean()))
    for heads in (0, 2):
        with pytest.raises(ValueError, match=f"expected OwnHead to call its LM head once in a pass, got {heads} calls"):
            LMHead(own_head(heads=heads))
    # PEFT would leave out the bias, and a merged model has it again.
    biased = add_lora(tiny.make_model("bert"), LoraSettings(3), [5, 6])
    with pytest.raises(ValueError, match=r"leaves out the bias of the tied LM head of BertLMHead.*train all weights"):
        LMHead(biased)
    headless = own_head()
    headless.get_output_embeddings = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="expected a causal language model with an LM head, got OwnHead without one"):
        LMHead(headless)


def test_nothing_is_run_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert LMHead(own_head(before=Halved())).around == (False, False)


@pytest.mark.parametrize("architecture", tiny.LAYERS_BEFORE_HEAD)
@pytest.mark.parametrize("chunk", [1, 10**9])
def test_layers_before_the_head_in_chunks(architecture: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output goes through the head in the chunks in which a plain model's states do."""
    monkeypatch.setattr("stepjepa.models.cross_entropy.FEWEST_LOGITS", chunk)
    model, sizes, linear = tiny.make_model(architecture, "eager"), set(), F.linear
    ids, rows = torch.arange(3, 22)[None], torch.arange(29) % 19
    head, labels = LMHead(model), torch.arange(40, 69)

    def counted(inputs: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        if len(weight) == tiny.VOCABULARY:
            sizes.add(inputs.numel() // inputs.shape[-1])
        return linear(inputs, weight, *rest)

    states = model.get_decoder()(input_ids=ids).last_hidden_state[0]
    none = head.cross_entropy(states[:0].detach(), labels[:0])
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", counted)
        loss = head.cross_entropy(states, labels, rows)
    assert max(sizes) == (7 if chunk == 1 else 19)
    slow = F.cross_entropy(model(input_ids=ids).logits[0][rows], labels, reduction="sum")
    tiny.assert_same(loss, slow)
    tiny.assert_same_gradients(tiny.gradients(model, loss), tiny.gradients(model, slow))
    # A micro-batch without labels: the weights of the head take part, with a gradient of zero.
    assert float(none.detach()) == 0.0
    assert not any(bool(gradient.any()) for gradient in tiny.gradients(model, none).values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_trains_the_layers_before_the_head(adapter: bool, trained_tokenizer: Any, tmp_path: Path) -> None:
    """The Trainer's loss and its first update, checkpointed and accumulated, are those of the model's own loss."""
    model: Any = tiny.make_model("bert", "eager", seed=4, tie_word_embeddings=not adapter)
    if adapter:
        ids = all_predictor_ids(trained_tokenizer)
        model = add_lora(model, LoraSettings(3), ids)
        assert any("cls" in name for name, value in model.named_parameters() if value.requires_grad)
    plain = copy.deepcopy(model)
    # The older name warns in the newest version.
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    arguments = tiny.arguments(
        tmp_path,
        max_steps=1,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **{checkpointing: True},
    )
    records = [*tiny.records(), tiny.records()[0]]
    config = JepaConfig(mode="regular", predictors=0)
    trainer = JepaTrainer(model, arguments, config, train_dataset=records, processing_class=trained_tokenizer)
    assert trainer.encoding == "tree"
    trainer.train()
    tokenized = tiny.tokenized(trained_tokenizer, config, records)
    count = sum(len(record.labels) for record in tokenized)
    loss = torch.zeros(())
    for record in tokenized:
        row = torch.from_numpy(record.ids.astype(np.int64))[None]
        labels = torch.full_like(row, -100)
        labels[0, record.labels + 1] = row[0, record.labels + 1]
        loss = loss + plain(input_ids=row, labels=labels, use_cache=False).loss * len(record.labels) / count
    assert trainer.state.log_history[0]["lm_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    moved = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    steps = torch.autograd.grad(loss, list(moved.values()))
    trained = dict(trainer.model.named_parameters())
    for (name, value), step in zip(moved.items(), steps, strict=True):
        tiny.assert_same(trained[name], value - 0.1 * step, what=name)
    changed = [name for name, step in zip(moved, steps, strict=True) if "transform" in name and bool(step.any())]
    assert changed, "the dense layer in front of the LM head is trained"
