"""Records that make a loss or a gradient not finite, and short runs on two processes that meet them.

torchrun --nproc_per_node 2 tests/harmful.py FOLDER
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.training.trainer import JepaTrainer

# Stands in the record that is to do harm, and in no other.
BAD = "~"


def made(count: int, bad: Sequence[int]) -> list[Any]:
    """Records of lines 1 to ``count`` with pairs; those of the lines ``bad`` hold the token that does harm."""
    return [
        tiny.make_record("", f"q{line}{BAD if line in bad else ''}", f"a{line}.\n\nb{line}\n\nc", line=line)
        for line in range(1, count + 1)
    ]


class _Harm(torch.autograd.Function):
    """The same values, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.inf


def harm(model: Any, tokenizer: Any, kind: str) -> None:
    """Let one token's embedding make the loss NaN, or only its gradient infinite."""
    (token,) = tokenizer.encode(BAD, add_special_tokens=False)

    def spoil(_module: Any, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        bad = (args[0] == token)[..., None]
        if not bool(bad.any()):
            return None
        return output.masked_fill(bad, math.nan) if kind == "loss" else _Harm.apply(output)

    model.get_input_embeddings().register_forward_hook(spoil)


def trainer_of(
    tokenizer: Any, folder: Path, records: Any, kind: str, *, jepa: dict[str, Any] | None = None, **changes: Any
) -> JepaTrainer:
    on_nonfinite = changes.pop("on_nonfinite", "stop")
    fixed = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "learning_rate": 0.01}
    model = tiny.make_model("llama", seed=3)
    harm(model, tokenizer, kind)
    config = JepaConfig(**({"mode": "step-jepa", "encoding": "rows"} | (jepa or {})))
    return JepaTrainer(
        model,
        tiny.arguments(folder, **(fixed | changes)),
        config,
        train_dataset=records,
        processing_class=tokenizer,
        on_nonfinite=on_nonfinite,
    )


def weights(trainer: JepaTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


# What is not finite, and the alignment.
CASES = [("gradient", "infonce"), ("loss", "cosine")]


def trained(folder: Path, records: list[Any], kind: str, batch: int, *, on_nonfinite: str, loss: str) -> JepaTrainer:
    """A trainer before its run, whose steps are of two micro-batches of two records, over all processes."""
    from processes import tokenizer

    arguments = tiny.arguments(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        learning_rate=0.05,
        optim="sgd",
        max_steps=len(records) // 4,
        ddp_backend="gloo" if dist.is_torchelastic_launched() else None,
    )
    model, made_tokenizer = tiny.make_model("llama", seed=3), tokenizer()
    harm(model, made_tokenizer, kind)
    return JepaTrainer(
        model,
        arguments,
        JepaConfig(mode="step-jepa", encoding="rows", lbd=0.7, jepa_loss_type=loss),  # type: ignore[arg-type]
        train_dataset=records,
        processing_class=made_tokenizer,
        on_nonfinite=on_nonfinite,  # type: ignore[arg-type]
    )


def main(folder: Path) -> None:
    """All of them; the first process writes what came of them."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    records = made(12, [6])
    for kind, loss in CASES:
        place = folder / f"{kind}-{loss}"
        skipping = trained(place / "skip", records, kind, 1, on_nonfinite="skip", loss=loss)
        skipping.train()
        state = {key: value.clone() for key, value in skipping.model.state_dict().items()}
        stopping = trained(place / "stop", records, kind, 1, on_nonfinite="stop", loss=loss)
        said: list[Any] = [None] * dist.get_world_size()
        try:
            stopping.train()
        except UserError as error:
            dist.all_gather_object(said, (str(error), stopping.state.global_step))
        results[f"{kind} {loss}"] = (state, skipping.guard.skipped, said)
    if dist.get_rank() == 0:
        torch.save(results, folder / "harmful.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
