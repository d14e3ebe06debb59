"""Loss and gradients of trees against separate passes over each sequence in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.packing import make_collator
from stepjepa.objectives.setup import set_up

from .result import Result, compiled, rounded
from .world import World, jepa_config, make_records


def part_correct(world: World, result: Result) -> None:
    """Loss and gradients of a tree batch against those of separate passes over each sequence in float64."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    families: dict[str, dict[str, Any]] = {
        "llama": {"model_type": "llama", "head_dim": 32},
        "qwen2 window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 37,
                         "num_hidden_layers": 3,
                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "gemma2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 41, "query_pre_attn_scalar": 32},
        "qwen3, head 128": {"model_type": "qwen3", "head_dim": 128},
    }  # fmt: skip
    small: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 2048, "max_position_embeddings": 4096,
             "tie_word_embeddings": True}  # fmt: skip
    arms: dict[str, dict[str, Any]] = {
        "branched": {"mode": "llm-jepa", "layout": "branched", "jepa_loss_type": "cosine", "predictors": 2},
        "separate": {"mode": "llm-jepa", "layout": "separate", "jepa_loss_type": "cosine", "predictors": 1},
        "step": {"mode": "step-jepa", "layout": "branched", "jepa_loss_type": "cosine", "pairs": "all"},
        "inplace": {"mode": "step-jepa", "layout": "inplace", "jepa_loss_type": "cosine", "pairs": "all"},
    }
    records = make_records(6, world.sizes(260, 60), seed=3)
    cases = [("llama", "branched"), ("llama", "separate"), ("llama", "step"), ("llama", "inplace"),
             ("qwen2 window", "branched"), ("qwen3, head 128", "inplace"), ("gemma2", "branched")]  # fmt: skip
    # FlexAttention compiles some seconds for every shape and dtype, so this list has the cases that differ most.
    flex = [("llama", "branched", ("bfloat16", "autocast")), ("llama", "inplace", ("autocast",)),
            ("qwen2 window", "branched", ()), ("gemma2", "branched", ()),
            ("qwen3, head 128", "inplace", ("bfloat16",))]  # fmt: skip
    both = ("bfloat16", "autocast")
    # transformers refuses gemma2 with sdpa, because of its soft cap.
    fused = [case for case in cases if case[0] != "gemma2"]
    plan: list[tuple[str, str, str, tuple[str, ...]]] = [(*case, "tree_varlen", both) for case in fused]
    plan += [(*case, "eager", both) for case in cases if case != ("llama", "step")]
    plan += [(*case, "tree_sdpa", both) for case in fused]
    plan += [(family, arm, "flex_attention", halves) for family, arm, halves in flex]
    with result.trying("checkpointing", needs=15) as go:
        if go:
            differences = {}
            for kind in ("tree_sdpa", "tree_varlen", "flex_attention") if world.cuda else ("tree_sdpa", "tree_varlen"):
                before = compiled()
                differences[kind] = checkpointing(world, small | families["llama"], arms["branched"], kind, records)
                differences[kind]["graphs compiled"] = compiled() - before
            result.put("checkpointing", differences)
    worst: dict[str, float] = {}
    ratios: dict[str, float] = {}  # of the gradient's error in 16 bits to that of plain passes
    for family, arm, kind, halves in plan:
        name = f"{family} / {arm} / {kind}"
        if kind == "flex_attention" and not world.cuda:
            continue
        with result.trying(name, needs=4) as go:
            if go:
                errors = compare(world, small | families[family], arms[arm], kind, records, halves)
                result.put(name, errors)
                for key in ("loss", "gradient"):
                    worst[key] = max(worst.get(key, 0.0), errors["float32"][key])
                for half in halves:
                    if (plain := errors.get(f"plain passes, {half}")) and plain["gradient"]:
                        ratios[kind] = max(ratios.get(kind, 0.0), errors[half]["gradient"] / plain["gradient"])
    result.put("worst float32", {key: rounded(value, 3) for key, value in worst.items()})
    result.put("worst 16 bits over plain passes", {key: rounded(value, 3) for key, value in ratios.items()})
    exact = bool(worst) and worst["loss"] < 2e-5 and worst["gradient"] < 1e-3
    result.put("passes", exact and all(ratio < 1.5 for ratio in ratios.values()))


def small_model(world: World, config: dict[str, Any], kind: str, dtype: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conf = AutoConfig.for_model(**config)
        conf.pad_token_id = conf.bos_token_id = conf.eos_token_id = None
        model = AutoModelForCausalLM.from_config(conf, attn_implementation=kind).to(world.device)
        with torch.no_grad():  # large enough that attention is far from uniform
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.08)
    return model.to(dtype).train()


def collated(world: World, model: Any, config: Any, prepared: Any, count: int) -> tuple[Any, Any, Any]:
    """Set a model up. Returns the batch of the first records, their items with the collator, and the objective."""
    objective = Objective.from_config(config)
    encoding, _ = set_up(model, world.tokenizer, config)
    # As on several processes: a micro-batch is one pass.
    kinds: dict[str, Any] = {"encoding": encoding, "device_type": world.device, "processes": 2, "prompt_labels": False}
    collator = make_collator(model, world.tokenizer, config, **kinds)
    items = [prepared.dataset[index] for index in range(count)]
    return collator(items).to(world.device), (items, collator), objective


def slow_loss(model: Any, items: Any, collator: Any, config: Any, device: str) -> Any:
    """The objective by a separate pass over each sequence, without trees, without tree masks and without chunks."""
    nll: Any = 0.0
    distance: Any = 0.0
    labels = pairs = 0
    for item in items:
        read = {}
        for sequence in collator.sequences(item):
            ids = torch.from_numpy(sequence.ids).long().to(device)[None]
            states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
            if len(sequence.labels):
                table = torch.from_numpy(sequence.labels).long().to(device)
                logits = model.get_output_embeddings()(states[table[:, 0]])
                cap = getattr(model.config, "final_logit_softcapping", None)
                logits = logits if cap is None else torch.tanh(logits / cap) * cap
                nll = nll + F.cross_entropy(logits.double(), table[:, 1], reduction="sum")
                labels += len(table)
            for pair, which, _, end in sequence.readouts:
                read[which, pair] = states[end - 1].double()
        for pair in {pair for _, pair in read}:
            distance = distance + 1 - F.cosine_similarity(read["source", pair], read["target", pair], dim=0)
            pairs += 1
    return config.gamma * nll / labels + config.lbd * distance / max(pairs, 1)


def gradients_of(model: Any, loss: Any) -> Any:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.double().flatten().cpu() for p in model.parameters() if p.grad is not None])


def compare(
    world: World, shape: dict[str, Any], arm: dict[str, Any], kind: str, records: Any, halves: tuple[str, ...]
) -> dict[str, Any]:
    """Relative errors of loss and gradient against float64, for trees and for separate passes."""
    config = jepa_config(arm, lbd=1.0, row_length=world.sizes(700, 150))
    prepared = world.prepared(records, config)
    inplace = arm["layout"] == "inplace"

    def ours(device_kind: str, dtype: Any, autocast: bool = False) -> tuple[float, Any, Any]:
        model = small_model(world, shape, device_kind, dtype)
        batch, _, objective = collated(world, model, config, prepared, len(records))
        with torch.autocast(world.device, torch.bfloat16, enabled=autocast):
            loss = jepa_loss(model, batch, objective).loss
        return float(loss), gradients_of(model, loss), tuple(batch["input_ids"].shape)

    def theirs(dtype: Any, autocast: bool = False) -> tuple[float, Any]:
        model = small_model(world, shape, "eager", dtype)
        plain_kind = model.config._attn_implementation
        _, (items, collator), _ = collated(world, model, config, prepared, len(records))
        model.set_attn_implementation(plain_kind)
        with torch.autocast(world.device, torch.bfloat16, enabled=autocast):
            loss = slow_loss(model, items, collator, config, world.device)
        return float(loss), gradients_of(model, loss)

    # In layout 'inplace' a step sees only itself, which a separate pass can't do: compared with eager trees in float32.
    exact = ours("eager", torch.float32)[:2] if inplace else theirs(torch.float64)

    def errors(measured: tuple[Any, ...]) -> dict[str, float]:
        return {
            "loss": rounded(abs(measured[0] - exact[0]) / max(abs(exact[0]), 1e-30), 3),
            "gradient": rounded(float((measured[1] - exact[1]).norm() / exact[1].norm().clamp_min(1e-30)), 3),
        }

    single = ours(kind, torch.float32)
    summary: dict[str, Any] = {"rows": single[2], "float32": errors(single)}
    for name, dtype, autocast in (("bfloat16", torch.bfloat16, False), ("autocast", torch.float32, True)):
        if name not in halves:
            continue
        summary[name] = errors(ours(kind, dtype, autocast))
        if not inplace:
            summary[f"plain passes, {name}"] = errors(theirs(dtype, autocast))
    return summary


def checkpointing(world: World, shape: dict[str, Any], arm: dict[str, Any], kind: str, records: Any) -> dict[str, Any]:
    """Relative difference of the gradients with and without gradient checkpointing."""
    config = jepa_config(arm, row_length=world.sizes(700, 150))
    prepared, gradients = world.prepared(records, config), []
    for again in (False, True):
        model = small_model(world, shape, kind, torch.float32)
        batch, _, objective = collated(world, model, config, prepared, len(records))
        if again:
            # Releases of transformers from 5.23 on have another name for it.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        with torch.autocast(world.device, torch.bfloat16):
            loss = jepa_loss(model, batch, objective).loss
        gradients.append(gradients_of(model, loss))
    return {"gradient": rounded(float((gradients[1] - gradients[0]).norm() / gradients[0].norm()), 3)}
