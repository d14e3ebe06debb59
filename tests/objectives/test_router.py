"""The router loss: by hand, against the models' own function, on trees against separate passes, and in training."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.base.files import read_jsonl
from stepjepa.batch.costs import Costs
from stepjepa.batch.micro_batch import Batch
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.lm_head import LMHead
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.models.probe import choose_encoding
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.router import RouterLoss, describe_router, load_balance, router_loss
from stepjepa.store.record import read_run
from stepjepa.training.trainer import JepaTrainer

# Without deepseek_v3, which has no router loss of its own.
WITH_LOSS = ["qwen3_moe", "granite_moe", *(name for name in tiny.EXPERTS if name != "deepseek_v3")]
CONFIGURATIONS = {
    "regular": JepaConfig(mode="regular"),
    "llm separate": JepaConfig(mode="llm-jepa", layout="separate", predictors=1),
    "step branched": JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
}


def make_model(architecture: str) -> Any:
    """GPT-OSS has attention sinks, which sdpa does not know."""
    return tiny.make_model(architecture, "eager" if architecture == "gpt_oss" else "sdpa")


def only_router(model: Any) -> Objective:
    """The router loss of a model alone, at weight 1."""
    return Objective([RouterLoss(1.0, model.num_experts_per_tok)])


def own_loss(model: Any, tokenizer: Any, config: JepaConfig) -> Tensor:
    """The model's own function on the main sequences, each in a row of its own, padded on the right."""
    texts = [torch.from_numpy(record.ids.astype("int64")) for record in tiny.tokenized(tokenizer, config)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=7)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    loss: Tensor = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    return loss


def test_by_hand() -> None:
    """Two tokens of weight 2 and 1, a third that no main sequence holds; three experts."""
    layer = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8]]).log()
    uses = torch.tensor([2.0, 1.0, 0.0])
    # Sent to: 2/3, 1/3, 0. Mean probabilities: 1.2/3, 1.3/3, .5/3.
    one = 3 * (2 / 3 * 0.4 + 1 / 3 * 1.3 / 3)
    assert one == pytest.approx(1.2333333)
    assert load_balance((layer,), uses, 1).item() == pytest.approx(one)
    # Each token to two experts: 1, 1, 0.
    assert load_balance((layer,), uses, 2).item() == pytest.approx(3 * (0.4 + 1.3 / 3))
    # A second layer that is even sends its tokens to the first expert, since all are as good.
    even = load_balance((layer, torch.zeros(3, 3)), uses, 1).item()
    sent, mean = (5 / 6, 1 / 6, 0), ((1.2 + 1) / 6, (1.3 + 1) / 6, 1.5 / 6)
    assert even == pytest.approx(3 * sum(f * p for f, p in zip(sent, mean, strict=True)))
    # Even probabilities: the number of experts of a token, whatever it is sent to.
    assert load_balance((torch.zeros(3, 5),), uses, 2).item() == pytest.approx(2)


def test_autocast_rounds_nothing() -> None:
    """The term runs inside the model's forward pass, and so in its autocast; 257 uses are no number of bfloat16."""
    layer = torch.randn((3, 5), generator=torch.Generator().manual_seed(0), requires_grad=True)
    uses = torch.tensor([257.0, 3.0, 11.0])
    exact = load_balance((layer,), uses, 2)
    (gradient,) = torch.autograd.grad(exact, layer)
    with torch.autocast("cpu", torch.bfloat16):
        result = load_balance((layer,), uses, 2)
    assert torch.equal(result, exact)
    assert torch.equal(torch.autograd.grad(result, layer)[0], gradient)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("architecture", WITH_LOSS)
def test_trees_equal_the_models_own_loss_of_separate_rows(architecture: str, name: str, trained_tokenizer: Any) -> None:
    """With its gradients, though the tree holds views and stores what records share once."""
    config, plain, model = CONFIGURATIONS[name], make_model(architecture), make_model(architecture)
    encoding, _ = choose_encoding(model, "auto")
    assert encoding == ("rows" if architecture == "dbrx" else "tree")
    batch = tiny.batch_of(trained_tokenizer, config, encoding=encoding)
    if encoding == "tree":
        enable_trees(model)
        assert batch.num_tokens < sum(batch.records.lengths), "nothing is shared"
    result = jepa_loss(model, batch, only_router(model)).loss
    expected = own_loss(plain, trained_tokenizer, config)
    assert abs(float(expected.detach()) - plain.num_experts_per_tok) > 0.01, "the load is even, and says nothing"
    tiny.assert_same(result, expected, 2e-6)
    tiny.assert_same_gradients(tiny.gradients(model, result), tiny.gradients(plain, expected))


def test_several_passes_and_plain_rows(trained_tokenizer: Any) -> None:
    config, model = CONFIGURATIONS["llm separate"], tiny.make_model("mixtral")
    expected = own_loss(model, trained_tokenizer, config)
    rows = tiny.batch_of(trained_tokenizer, config, encoding="rows")
    tiny.assert_same(jepa_loss(model, rows, only_router(model)).loss, expected, 2e-6)
    enable_trees(model)
    passes = tiny.batch_of(trained_tokenizer, config, costs=Costs(1, 1 / 20))
    assert len(passes.passes) > 1
    tiny.assert_same(jepa_loss(model, passes, only_router(model)).loss, expected, 2e-6)


def test_predictors_in_the_text_do_not_count(trained_tokenizer: Any) -> None:
    """In place, the row holds tokens that no text has; positions of the text count once each."""
    config = JepaConfig(mode="step-jepa", layout="inplace", predictors=2, pairs="all")
    model, batch = tiny.make_model("mixtral"), tiny.batch_of(trained_tokenizer, config)
    enable_trees(model)
    LMHead(model)  # runs the model once
    logits: list[Tensor] = []
    gates = [module for module in model.modules() if type(module).__name__ == "MixtralTopKRouter"]
    handles = [gate.register_forward_hook(lambda _module, _args, output: logits.append(output[0])) for gate in gates]
    result = jepa_loss(model, batch, only_router(model)).loss
    for handle in handles:
        handle.remove()
    places = torch.cat([torch.from_numpy(path) for path in batch.records.paths])
    assert not set(batch.token_ids[places].tolist()) & set(range(290, 294)), "a predictor token is in a text"
    picked = tuple(layer[places] for layer in logits)
    tiny.assert_same(result, load_balance(picked, torch.ones(len(places)), 2))


def test_an_empty_batch_is_zero_and_reaches_every_parameter(trained_tokenizer: Any) -> None:
    model = tiny.make_model("mixtral")
    enable_trees(model)
    batch = tiny.collator(trained_tokenizer, JepaConfig())([None, None])
    objective = Objective.from_config(JepaConfig(mode="regular"), model)
    losses = jepa_loss(model, batch, objective)
    assert objective.counts([batch])["router_loss"] == 0
    assert float(losses.parts["router_loss"].detach()) == 0
    losses.loss.backward()
    assert not [name for name, value in model.named_parameters() if value.grad is None or value.grad.any()]


@pytest.mark.parametrize("architecture", WITH_LOSS)
def test_weight_is_the_models_own(architecture: str) -> None:
    model = make_model(architecture)
    own = {"olmoe": 0.01, "jetmoe": 0.01, "dbrx": 0.05}.get(architecture, 0.001)
    assert router_loss(JepaConfig(), model) == RouterLoss(own, model.num_experts_per_tok)
    assert router_loss(JepaConfig(router_loss=0.3), model) == RouterLoss(0.3, model.num_experts_per_tok)
    assert router_loss(JepaConfig(router_loss=0.0), model) is None
    assert f"{own:g}, the model's own" in str(describe_router(JepaConfig(), model))
    assert describe_router(JepaConfig(router_loss=0.0), model) == "none, as asked for"


def test_models_without_a_router_loss() -> None:
    dense, other = tiny.make_model("llama"), tiny.make_model("deepseek_v3")
    none = tiny.make_model("mixtral", router_aux_loss_coef=0.0)
    assert describe_router(JepaConfig(), dense) is None
    assert "DeepseekV3ForCausalLM returns no router logits" in str(describe_router(JepaConfig(), other))
    assert "router_aux_loss_coef is 0" in str(describe_router(JepaConfig(), none))
    for model in (dense, other, none):
        assert router_loss(JepaConfig(), model) is None
        assert Objective.from_config(JepaConfig(mode="regular"), model).names == ["lm_loss"]
    for model in (dense, other):
        with pytest.raises(ValueError, match=r"router_loss 0.1: \w+ForCausalLM has no router loss"):
            router_loss(JepaConfig(router_loss=0.1), model)
    assert router_loss(JepaConfig(router_loss=0.1), none) == RouterLoss(0.1, 2)


def test_only_the_decoder_is_asked(trained_tokenizer: Any) -> None:
    """The model's own loss, over views and padding, is not computed; without the term no logits are asked for."""
    model = tiny.make_model("mixtral")
    LMHead(model)  # runs the model once
    batch = tiny.batch_of(trained_tokenizer, CONFIGURATIONS["regular"], encoding="rows")
    observed: list[Any] = []
    model.register_forward_hook(lambda _module, _args, output: observed.append(output))
    jepa_loss(model, batch, Objective.from_config(JepaConfig(mode="regular"), model))
    jepa_loss(model, batch, Objective.from_config(JepaConfig(mode="regular")))
    assert [output.aux_loss for output in observed] == [None, None]
    assert [output.router_logits is None for output in observed] == [False, True]


# -- training ----------------------------------------------------------------------------------------------------------


def checkpointed(model: Any, **options: Any) -> Any:
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False} | options)
    return model


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing(lora: bool, trained_tokenizer: Any) -> None:
    config = CONFIGURATIONS["llm separate"]
    batch = tiny.batch_of(trained_tokenizer, config)
    result = []
    for again in (False, True):
        model = tiny.make_model("mixtral").train()
        enable_trees(model)
        if lora:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = add_lora(model, LoraSettings(rank=3, targets="q_proj,v_proj,o_proj"), [])
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(0.1)
        model = checkpointed(model) if again else model
        loss = jepa_loss(model, batch, Objective.from_config(JepaConfig(mode="regular", router_loss=0.7), model)).loss
        result.append({name: value for name, value in tiny.gradients(model, loss).items() if value.any()})
    tiny.assert_same_gradients(*result)
    gates = [name for name in result[0] if name.endswith("gate.weight")]
    assert bool(gates) is not lora


def test_reentrant_checkpointing_is_refused(trained_tokenizer: Any) -> None:
    model = checkpointed(tiny.make_model("mixtral"), use_reentrant=True)
    model.enable_input_require_grads()
    batch = tiny.batch_of(trained_tokenizer, CONFIGURATIONS["regular"], encoding="rows")
    with pytest.raises(ValueError, match="set use_reentrant to false"):
        jepa_loss(model, batch, Objective.from_config(JepaConfig(mode="regular"), model))


def train(tokenizer: Any, folder: Path, config: JepaConfig, **options: Any) -> JepaTrainer:
    fixed = {"learning_rate": 0.05, "optim": "sgd", "train_sampling_strategy": "sequential"}
    # Each run has a folder of its own.
    arguments = tiny.arguments(Path(tempfile.mkdtemp(dir=folder)), **fixed, **options)
    trainer = JepaTrainer(
        tiny.make_model("mixtral", seed=3),
        arguments,
        config,
        train_dataset=tiny.records(),
        eval_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
    )
    trainer.train()
    return trainer


def value_of(model: Any, batch: Batch) -> float:
    with torch.no_grad():
        return float(jepa_loss(model, batch, only_router(model)).loss)


def test_a_step_of_the_trainer(trained_tokenizer: Any, tmp_path: Path) -> None:
    """A mean over micro-batches, each a product of means of its own; not what one batch of all records gives."""
    config = CONFIGURATIONS["llm separate"]
    options: dict[str, Any] = {"max_steps": 1, "per_device_eval_batch_size": 3}
    ones = options | {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    parts = train(trained_tokenizer, tmp_path, config, **ones)
    whole = train(trained_tokenizer, tmp_path, config, per_device_train_batch_size=3, **options)
    model = tiny.make_model("mixtral", seed=3)
    enable_trees(model)
    alone = [value_of(model, tiny.batch_of(trained_tokenizer, config, [record])) for record in tiny.records()]
    together = value_of(model, tiny.batch_of(trained_tokenizer, config))
    logged = parts.state.log_history[0]
    assert logged["router_loss"] == pytest.approx(sum(alone) / 3, rel=1e-5)
    assert whole.state.log_history[0]["router_loss"] == pytest.approx(together, rel=1e-5)
    assert abs(together - sum(alone) / 3) > 1e-3
    total = logged["lm_loss"] + 0.1 * logged["jepa_loss"] + 0.001 * logged["router_loss"]
    assert logged["loss"] == pytest.approx(total, rel=1e-6)
    # Of the weights behind the step; one batch of all records.
    after = value_of(whole.model, tiny.batch_of(trained_tokenizer, config))
    assert whole.evaluate()["eval_router_loss"] == pytest.approx(after, rel=1e-5)


def test_weight_0_is_training_without_it(trained_tokenizer: Any, tmp_path: Path) -> None:
    without = train(trained_tokenizer, tmp_path, JepaConfig(mode="regular", router_loss=0.0), max_steps=13)
    strong = train(trained_tokenizer, tmp_path, JepaConfig(mode="regular", router_loss=7.0), max_steps=13)
    assert "router_loss" not in without.state.log_history[0]
    batch = tiny.batch_of(trained_tokenizer, CONFIGURATIONS["regular"])
    uneven, even = (value_of(trainer.model, batch) - 2 for trainer in (without, strong))
    assert 0 <= even < uneven / 2


@pytest.mark.slow
def test_the_first_screen_and_the_log(trained_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    tiny.write_material(tmp_path, trained_tokenizer)
    tiny.make_model("mixtral").save_pretrained(tmp_path / "base")
    run = ["train", "--train_file", f"{tmp_path}/data.jsonl", "--model_name", f"{tmp_path}/base", "--regular"]
    run += ["--max_steps", "1", "--logging_steps", "1", "--use_cpu"]
    assert main([*run, "--output_dir", f"{tmp_path}/a"]) == 0
    assert "weight 0.001, the model's own (router_aux_loss_coef)" in " ".join(capsys.readouterr().out.split())
    (line, *_) = [line for _, line in read_jsonl(tmp_path / "a" / "metrics.jsonl")]
    assert 1.9 < line["router_loss"] < 2.3
    # The weight that was the model's own is in the record, as a number.
    assert read_run(tmp_path / "a")["jepa"]["router_loss"] == 0.001
    assert main([*run, "--output_dir", f"{tmp_path}/b", "--router_loss", "0"]) == 0
    assert "router loss: none, as asked for" in " ".join(capsys.readouterr().out.split())
    tiny.make_model("llama").save_pretrained(tmp_path / "base")
    assert main([*run, "--output_dir", f"{tmp_path}/c", "--router_loss", "0.1"]) == 2
    assert "LlamaForCausalLM has no router loss" in capsys.readouterr().err
