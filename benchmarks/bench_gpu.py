"""Some points of ``gpu.py``: one model on records of one length, every arm, in a process of its own."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bench_forests import Shape, make_forests
from bench_published import PublishedCollator, Texts, published_loss
from bench_training import SEED, peak_mib
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stepjepa.compute.flops import FlopModel
from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.models.attention import enable_forest
from stepjepa.models.checkpointing import enable_selective
from stepjepa.models.embeddings import forward
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.models.setup import base_model
from stepjepa.objectives.objective import Objective

FLASH = "flash_attention_2"
FLEX = "flex_attention"
FAILED = "failed"
LEARNING_RATE = 1e-5
PREDICTOR_ROOM = 8
WARMUP, FEWEST = 2, 3

# The shapes of published models; the weights are random.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}

# name -> (fields of JepaConfig, or None for the published way; attention)
ARMS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "regular, sdpa causal": ({"mode": "regular"}, "sdpa"),
    f"regular, {FLASH}": ({"mode": "regular", "encoding": "rows"}, FLASH),
    "published two rows, dense mask": (None, "sdpa"),
}
for _name, _fields in {
    "llm-jepa separate": {"mode": "llm-jepa", "layout": "separate"},
    "llm-jepa branched": {"mode": "llm-jepa", "layout": "branched"},
    "step-jepa first": {"mode": "step-jepa"},
}.items():
    ARMS[f"{_name}, forest, sdpa dense mask"] = ({**_fields, "encoding": "forest"}, "sdpa")
    ARMS[f"{_name}, forest, flex block mask"] = ({**_fields, "encoding": "forest"}, FLEX)
    ARMS[f"{_name}, rows, sdpa causal"] = ({**_fields, "encoding": "rows"}, "sdpa")
    ARMS[f"{_name}, rows, {FLASH}"] = ({**_fields, "encoding": "rows"}, FLASH)


def measure_ceiling(task: dict[str, Any]) -> dict[str, Any]:
    """FLOP/s of a large square matrix product in bfloat16, the most that a model can hope for.

    Args:
        task: ``device``, ``size`` and ``seconds``.
    """
    device = torch.device(task["device"])
    first, second = (torch.randn(task["size"], task["size"], device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds, runs = _time(lambda: torch.mm(first, second), device, task["seconds"])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"flops_per_second": 2 * task["size"] ** 3 * runs / seconds, "device": name}


def measure_length(task: dict[str, Any]) -> dict[str, Any]:
    """Train every arm for some steps on records of one length.

    Batches are made beforehand and lie on the device: this measures the model's passes and the optimizer.

    Args:
        task: ``model`` (key of ``SHAPES``), ``tiny``, ``lora``, ``checkpointing`` (on, off or selective), ``length``,
            ``steps``, ``tokens`` (of the main texts of a batch), ``arms``, ``device``, ``seconds``, ``ceiling``
            (FLOP/s).

    Returns:
        ``points`` by arm; a text instead of figures says why there are none.
    """
    points: dict[str, Any] = {}
    for name in task["arms"]:
        if ARMS[name][1] == FLASH and importlib.util.find_spec("flash_attn") is None:
            points[name] = "flash-attn is not installed"
            continue
        try:
            points[name] = _measure_arm(name, task)
        except torch.OutOfMemoryError:
            points[name] = "out of memory"
        except Exception as error:  # what was measured on a borrowed GPU must not be lost for one arm
            points[name] = f"{FAILED}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        gc.collect()
        if task["device"] != "cpu":
            torch.cuda.empty_cache()
    return {"points": points}


def _make_model(task: dict[str, Any], attention: str) -> tuple[Any, int]:
    shape = dict(SHAPES[task["model"]]) | (TINY if task["tiny"] else {})
    config = AutoConfig.for_model(
        shape.pop("model_type"),
        **shape,
        max_position_embeddings=4 * task["length"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(SEED)
    with torch.device(task["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    vocabulary = int(config.vocab_size)
    if task["lora"]:
        model = add_lora(model, LoraSettings(16), list(range(vocabulary - PREDICTOR_ROOM, vocabulary)))
    if task["checkpointing"] == "selective":
        enable_selective(model)
    elif task["checkpointing"] == "on":
        base = base_model(model)
        # The newer name, where transformers has it already.
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train(), vocabulary


def _measure_arm(name: str, task: dict[str, Any]) -> dict[str, Any]:
    fields, attention = ARMS[name]
    device = torch.device(task["device"])
    trains = not (attention == FLEX and device.type == "cpu")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model, vocabulary = _make_model(task, attention)
    shape = Shape(task["length"], task["steps"], vocabulary)
    count = max(1, task["tokens"] // task["length"])
    loss, batch, cells = (_ours(model, fields, shape, count) if fields else _published(model, shape, count))(device)
    flops = FlopModel.of(model).of_pass(*cells, backward=trains)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=device.type == "cuda")

    def step() -> None:
        if not trains:
            with torch.no_grad():
                loss()
            return
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, steps = _time(step, device, task["seconds"])
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else peak_mib()
    per_step = seconds / steps
    return {
        "records": count,
        "rows": cells[0],
        "row_length": cells[1],
        "steps": steps,
        # FlexAttention has no backward pass on a CPU.
        "forward_only": not trains,
        "seconds_per_step": per_step,
        # Tokens of the records' own text: the same for every arm, whatever it needs for its views.
        "main_tokens_per_second": count * task["length"] / per_step,
        "tokens_per_second": float(batch["num_tokens"].sum()) / per_step,
        "mfu": flops / per_step / task["ceiling"],
        "peak_mib": peak,
    }


def _ours(model: Any, fields: dict[str, Any], shape: Shape, count: int) -> Callable[[torch.device], Any]:
    config = JepaConfig(**fields, max_length=shape.length)
    encoding = "rows" if fields.get("encoding") == "rows" else "forest"
    if encoding == "forest" and config.uses_views:
        enable_forest(base_model(model))
    objective = Objective.from_config(config)

    def build(device: torch.device) -> Any:
        batch = ForestCollator(0, encoding)(make_forests(config, shape, count, SEED))
        batch = {key: value.to(device) for key, value in batch.items()}
        counts = torch.tensor([batch["label_ids"].numel(), batch["source_index"].numel(), 0], device=device)

        def loss() -> Tensor:
            return objective.parts(objective.sums(forward(model, batch)), counts)["loss"]

        rows, length = batch["input_ids"].shape
        return loss, batch, (rows, length, batch["label_ids"].numel(), batch["source_index"].numel())

    return build


def _published(model: Any, shape: Shape, count: int) -> Callable[[torch.device], Any]:
    def build(device: torch.device) -> Any:
        half, tail = shape.length // 2, shape.predictors(1).tolist()
        forests = make_forests(JepaConfig(mode="regular", max_length=shape.length), shape, count, SEED)
        chats = [forest.input_ids.tolist() for forest in forests]
        # Ids that no text has.
        special = SimpleNamespace(pad_token_id=shape.vocabulary - 2, eos_token_id=shape.vocabulary - 3)
        # Both views with K = 1 are a token longer than the chat: as shipped there is room, a multiple of 64.
        collator = PublishedCollator(special, "two rows", -(-(shape.length + 1) // 64) * 64)
        batch = collator([Texts(chat, chat[:half] + tail, chat[half:]) for chat in chats])
        batch = {key: value.to(device) for key, value in batch.items()}
        rows, length = batch["input_ids"].shape
        return lambda: published_loss(model, batch, 0.1)[2], batch, (rows, length, rows * length, 0)

    return build


def _time(run: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, int]:
    """Seconds and number of runs after a warm-up: as many as fit, but at least a few."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(WARMUP):
        run()
    began, runs, end = now(), 0, 0.0
    while runs < FEWEST or end - began < seconds:
        run()
        runs += 1
        end = now()
    return end - began, runs
