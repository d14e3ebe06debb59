"""The one forward pass: what terms read inside it, averaged weights for targets, trained modules beside the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from slow_trees import logits_of
from stepjepa.batch.micro_batch import Batch
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.models import ema
from stepjepa.models.architecture import (
    PredictorHead,
    attach_heads,
    find_decoder,
    find_heads,
    load_heads,
    save_heads,
    split_state,
    without_heads,
)
from stepjepa.models.attention import enable_trees
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.encode import encode
from stepjepa.models.encoded import Encoded, pool_readouts
from stepjepa.models.loading import add_lora
from stepjepa.objectives.alignment import Alignment
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.training.trainer import JepaTrainer

ModelFactory = Callable[..., Any]


@pytest.fixture
def batch(trained_tokenizer: Any) -> Batch:
    return tiny.batch_of(trained_tokenizer, JepaConfig(predictors=1), prompt_labels=True)


def ready(factory: ModelFactory, architecture: str = "llama") -> Any:
    model = factory(architecture, "eager")
    enable_trees(model)
    return model


def run(model: nn.Module, batch: Batch, **options: Any) -> dict[str, Tensor]:
    def evaluate(encoded: Encoded) -> dict[str, Tensor]:
        index = batch.head_index
        return {
            "loss": encoded.token_loss(index, batch.label_ids, batch.label_row),
            "logits": encoded.logits(index),
            "source": encoded.pairs[0],
            "target": encoded.pairs[1],
            "first": encoded.at(torch.tensor([[0, 3], [5, 2]])),
        }

    return encode(model, batch, evaluate, **options)


@pytest.mark.parametrize("architecture", ["llama", "gemma2_window", "gpt2", "qwen3_moe", "granite"])
def test_against_the_whole_output(architecture: str, tiny_model: ModelFactory, batch: Batch) -> None:
    """The head sees the positions that it is asked for, and still scales and caps them as the model does."""
    model = ready(tiny_model, architecture)
    with torch.no_grad():
        result, states = run(model, batch), tiny.hidden_states(model, batch)
        logits = logits_of(model, states[batch.head_index])
    tiny.assert_same(result["logits"], logits)
    wanted = F.cross_entropy(logits[batch.label_row], batch.label_ids, reduction="sum")
    tiny.assert_same(result["loss"], wanted)
    assert torch.equal(result["source"], states[batch.source_index])
    assert torch.equal(result["target"], states[batch.target_index])
    assert torch.equal(result["first"], states[torch.tensor([[0, 3], [5, 2]])])


def test_no_logits_of_the_whole_batch_are_made(tiny_model: ModelFactory, batch: Batch) -> None:
    model = ready(tiny_model)
    run(model, batch)  # tries the head out with one token
    made: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: made.append(output.shape[-2]))
    run(model, batch)
    assert max(made) <= len(batch.head_index) < batch.input_ids.numel()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_window"])
def test_gradient_checkpointing_changes_no_gradient(architecture: str, tiny_model: ModelFactory, batch: Batch) -> None:
    """The blocks run again in the backward pass, where no tree mask is set."""
    actual = []
    for checkpointing in (False, True):
        model = ready(tiny_model, architecture).train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        result = run(model, batch)
        loss = result["loss"] + result["source"].square().sum() + result["target"].sum()
        actual.append(tiny.gradients(model, loss))
    tiny.assert_same_gradients(actual[1], actual[0], 1e-6)


@pytest.mark.parametrize("wrap", ["plain", "wrapped twice", "adapter"])
def test_under_wrappers(wrap: str, tiny_model: ModelFactory, batch: Batch, tiny_tokenizer: Any) -> None:
    model = ready(tiny_model)
    with torch.no_grad():
        wanted = run(model, batch)
        wrapped: Any = nn.DataParallel(nn.DataParallel(model)) if wrap == "wrapped twice" else model
        if wrap == "adapter":
            wrapped = add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer)).eval()
        assert find_decoder(wrapped) is find_decoder(model)
        for name, value in run(wrapped, batch).items():
            tiny.assert_same(value, wanted[name], what=name)


def test_other_layers(tiny_model: ModelFactory, batch: Batch) -> None:
    model = ready(tiny_model, "smollm3")
    index = batch.source_index
    with torch.no_grad():

        def evaluate(encoded: Encoded) -> dict[str, Tensor]:
            result = {str(layer): encoded.at(index, layer) for layer in (0, 2, -2, -1)}
            with pytest.raises(ValueError, match=r"a layer that a term names in 'layers' \(-2, -1, 0, 2\), got 1"):
                encoded.at(index, 1)
            return result | {"source": encoded.pairs[0]}

        result = encode(model, batch, evaluate, layer=2, layers=(0, -2))
        for layer in (0, 2, -2, -1):
            assert torch.equal(result[str(layer)], tiny.hidden_states(model, batch, layer)[index])
    assert torch.equal(result["source"], result["2"])
    # The last one is the same by both its numbers, after the final norm.
    assert torch.equal(tiny.hidden_states(model, batch, 5), tiny.hidden_states(model, batch, -1))
    assert not torch.allclose(result["2"], result["-1"], atol=1e-3)
    for wrong in ({"layer": 6}, {"layers": (-7,)}):
        with pytest.raises(ValueError, match="jepa_layer: expected -6 to 5 for a model of 5 layers"):
            run(model, batch, **wrong)


def test_a_head_maps_the_source_alone(tiny_model: ModelFactory, batch: Batch) -> None:
    model = ready(tiny_model)
    with torch.no_grad():
        without = run(model, batch)
        attach_heads(model, {"predictor_head": PredictorHead("mlp", 33)})
        wanted = without | {"source": model.term_heads["predictor_head"](without["source"])}
        assert all(torch.equal(value, wanted[name]) for name, value in run(model, batch).items())


def test_a_model_without_a_head_or_a_decoder_is_refused(
    tiny_model: ModelFactory, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ready(tiny_model)
    run(model, batch)
    monkeypatch.setattr(model, "forward", model.model.forward)
    with pytest.raises(ValueError, match="expected LlamaForCausalLM to call its LM head once in a pass, got 0 calls"):
        run(model, batch)

    class Bare(nn.Module):
        def get_decoder(self) -> nn.Module:
            return self

    with pytest.raises(ValueError, match="expected a causal language model with a decoder, got Bare"):
        find_decoder(Bare())


def test_read_averages_some_tokens() -> None:
    states = torch.arange(22.0).reshape(11, 2)
    index = torch.tensor([4, 9, 0])
    batch = Batch(
        source_index=index,
        source_tokens=torch.tensor([2, 3, 4, 9, 0]),
        source_pair=torch.tensor([0, 0, 0, 1, 2]),
        target_index=index,
    )
    assert pool_readouts(states, batch, "source").tolist() == [[6.0, 7.0], [18.0, 19.0], [0.0, 1.0]]
    assert torch.equal(pool_readouts(states, batch, "target"), states[index])
    half = pool_readouts(states.bfloat16(), batch, "source")
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [[6.0, 7.0], [18.0, 19.0], [0.0, 1.0]]
    assert pool_readouts(states, Batch(source_index=index[:0]), "source").shape == (0, 2)


def test_the_average_by_hand() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    encoder = EmaEncoder(model, 0.75)
    torch.nn.init.constant_(model.weight, 6.0)
    encoder.update(model)
    # 0.75 * 2 + 0.25 * 6 = 3, then 0.75 * 3 + 0.25 * 6 = 3.75
    assert encoder._average["weight"].item() == 3.0
    encoder.update(model)
    assert encoder._average["weight"].item() == 3.75


@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize("encoding", ["tree", "rows"])
def test_states_are_those_of_the_averaged_model(encoding: str, layer: int, trained_tokenizer: Any) -> None:
    batch = tiny.batch_of(trained_tokenizer, JepaConfig(mode="step-jepa", pairs="all"), encoding=encoding)
    model, other = tiny.make_model("llama", seed=1), tiny.make_model("llama", seed=2)
    for each in (model, other):
        enable_trees(each)
    encoder = EmaEncoder(model, 0.5)
    encoder.update(other)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mean, second in zip(average.parameters(), other.parameters(), strict=True):
            mean.copy_((mean + second) / 2)
        slow = tiny.hidden_states(average, batch, layer)
        before = tiny.hidden_states(model, batch, layer)
    result = encoder.states(batch, layer)
    tiny.assert_same(result, slow)
    assert not result.requires_grad
    assert not torch.allclose(result, before, atol=1e-2)


def test_averaged_targets_are_read_where_embeddings_are(tiny_model: ModelFactory, batch: Batch) -> None:
    model, asked = ready(tiny_model), list[int]()
    average = torch.randn(batch.input_ids.numel(), 33, generator=torch.Generator().manual_seed(7))

    def ema_states(given: Batch, layer: int) -> Tensor:
        assert given is batch
        asked.append(layer)
        return average

    context = Context(ema_states=ema_states)
    losses = jepa_loss(model, batch, Objective([Alignment()], layer=1), context=context)
    assert asked == [1]
    assert torch.equal(losses.target, average[batch.target_index])


def test_half_precision_keeps_its_average_in_single() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.constant_(model.weight, 1.0)
    encoder = EmaEncoder(model, 0.999)
    torch.nn.init.constant_(model.weight, 2.0)
    for _ in range(3):
        encoder.update(model)
    assert encoder._average["weight"].item() == pytest.approx(2 - 0.999**3, abs=1e-6)
    assert next(encoder._model.parameters()).dtype == torch.bfloat16
    # Without dropout, whatever the model that is trained has.
    assert model.training and not encoder._model.training


def test_what_an_adapter_leaves_frozen_is_shared(tiny_tokenizer: Any) -> None:
    model: Any = add_lora(tiny.make_model("llama"), LoraSettings(3), all_predictor_ids(tiny_tokenizer))
    encoder = EmaEncoder(model, 0.5)
    own = dict(encoder._model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (own[name] is parameter) == (not parameter.requires_grad), name
        assert parameter.requires_grad == (name in encoder._average)


def test_averages_are_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny.make_model("llama", seed=1)
    encoder = EmaEncoder(model, 0.5)
    encoder.update(tiny.make_model("llama", seed=2))
    encoder.save(tmp_path)
    again = EmaEncoder(model, 0.5)
    again.load(tmp_path)
    assert all(torch.equal(value, again._average[name]) for name, value in encoder._average.items())
    with pytest.raises(ValueError, match=r"expected ema\.safetensors"):
        again.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected the averages of 1 weights in .*, got \d+"):
        EmaEncoder(torch.nn.Linear(1, 1, bias=False), 0.5).load(tmp_path)


def test_the_trainer_updates_it_once_a_step_and_scores_with_it(trained_tokenizer: Any, tmp_path: Path) -> None:
    """Two steps of SGD by the trainer, against the same two written out."""
    config = JepaConfig(mode="step-jepa", target_grad="ema", ema_decay=0.5, lbd=0.7)
    records = tiny.records()[:2]
    trainer = JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(
            tmp_path, learning_rate=0.05, optim="sgd", per_device_train_batch_size=2, lr_scheduler_type="constant"
        ),
        config,
        train_dataset=records,
        processing_class=copy.deepcopy(trained_tokenizer),
    )
    trainer.train()
    model = tiny.make_model("llama", seed=3).train()
    enable_trees(model)
    average = copy.deepcopy(model).eval()
    batch = tiny.batch_of(trained_tokenizer, config, records)
    regular = Objective.from_config(JepaConfig(mode="regular"))
    for step in range(3):
        with torch.no_grad():
            target = pool_readouts(tiny.hidden_states(average, batch), batch, "target")
        lm = jepa_loss(model, batch, regular).loss
        source = pool_readouts(tiny.hidden_states(model, batch), batch, "source")
        jepa = (1 - torch.nn.functional.cosine_similarity(source, target)).mean()
        line = trainer.state.log_history[step]
        assert line["jepa_loss"] == pytest.approx(jepa.item(), rel=1e-4)
        model.zero_grad()
        (lm + 0.7 * jepa).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
                parameter.sub_(0.05 * parameter.grad)
                mean.copy_(0.5 * mean + 0.5 * parameter)
    for (name, value), same in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(value, same, atol=1e-5), name


def test_predictor_heads_by_hand() -> None:
    values = torch.tensor([[1.0, -2.0]])
    linear, mlp = PredictorHead("linear", 2), PredictorHead("mlp", 2)
    with torch.no_grad():
        for parameter in [*linear.parameters(), *mlp.parameters()]:
            parameter.fill_(0.5)
    # 0.5 * (1 - 2) + 0.5
    assert torch.allclose(linear(values), torch.zeros(1, 2))
    # GELU(0) four times, times 0.5, plus 0.5
    assert torch.allclose(mlp(values), torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="expected linear or mlp, got 'deep'"):
        PredictorHead("deep", 2)


def test_weights_of_heads_depend_on_the_seed_alone() -> None:
    config, objective = tiny.make_model("llama").config, Objective([Alignment(head="mlp")])
    state = torch.random.get_rng_state()
    first, second, other = (objective.heads(config, seed)["predictor_head"].state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state), "heads must not move the global generator"
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert not torch.equal(value, other[name])


def test_heads_are_attached_found_taken_out_and_replaced() -> None:
    model = tiny.make_model("llama")
    names = set(model.state_dict())
    attach_heads(model, {"one": nn.Linear(3, 5), "two": nn.Linear(5, 3)})
    wrapped = nn.Sequential(model)
    result = find_heads(wrapped)
    assert result is not None
    with without_heads(model) as taken:
        assert taken is result
        assert find_heads(wrapped) is None
        assert set(model.state_dict()) == names
    assert find_heads(model) is result
    attach_heads(model, {"one": nn.Linear(7, 5)})
    assert list(find_heads(model) or ()) == ["one"]
    attach_heads(model, {})
    assert set(model.state_dict()) == names


@pytest.mark.parametrize(("lora", "wanted"), [(False, torch.bfloat16), (True, torch.float32)])
def test_heads_have_the_dtype_of_what_is_trained(lora: bool, wanted: torch.dtype, tiny_tokenizer: Any) -> None:
    """An adapter is in single precision also where its base is not, and so is the head."""
    model: Any = tiny.make_model("llama").bfloat16()
    if lora:
        model = add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer))
    attach_heads(model, {"head": PredictorHead("linear", 33)})
    assert model.term_heads["head"](torch.randn(2, 33).bfloat16()).dtype == wanted


def test_heads_are_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    attach_heads(model, {"first": PredictorHead("mlp", 6), "second": nn.Linear(7, 3)})
    heads = find_heads(model)
    assert heads is not None
    rest, own = split_state(model.state_dict())
    assert rest.keys() == tiny.make_model("llama").state_dict().keys()
    assert own.keys() == heads.state_dict().keys()
    save_heads(own, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.safetensors", "second.safetensors"]
    again = nn.ModuleDict({"first": PredictorHead("mlp", 6), "second": nn.Linear(7, 3)})
    load_heads(again, tmp_path)
    for name, value in heads.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    with pytest.raises(
        ValueError, match=r"expected third\.safetensors in .*, got none; the checkpoint was made without"
    ):
        load_heads(nn.ModuleDict({"third": nn.Linear(7, 3)}), tmp_path)
    for other in (nn.Linear(7, 4), nn.Bilinear(7, 3, 3), nn.Linear(7, 3, bias=False)):
        with pytest.raises(RuntimeError, match="loading state_dict"):
            load_heads(nn.ModuleDict({"second": other}), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_in_groups_are_those_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several weights, of one, and one weight that is larger than a group."""
    monkeypatch.setattr(ema, "UPDATED_TOGETHER", 40)
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.ModuleList([torch.nn.Linear(wide, 3) for wide in (5, 17, 1, 2, 11)]).to(dtype)
    model[2].weight.requires_grad_(False)
    averages = {name: each.detach().float().clone() for name, each in model.named_parameters() if each.requires_grad}
    encoder = EmaEncoder(model, 0.75)
    for _ in range(3):
        for name, each in model.named_parameters():
            if each.requires_grad:
                with torch.no_grad():
                    each.copy_(torch.randn(each.shape, generator=generator))
                averages[name] = 0.75 * averages[name] + 0.25 * each.detach().float()
        encoder.update(model)
    for name, average in averages.items():
        tiny.assert_same(encoder._average[name], average)
        assert torch.equal(encoder._weights[name], encoder._average[name].to(dtype))
