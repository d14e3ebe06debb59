"""LLM-JEPA with Lightning Fabric.

python examples/loops/in_lightning.py --train_file train.jsonl --steps 100 --output_dir runs/lightning
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import Any

import torch
from lightning_fabric import Fabric
from loop_arguments import LoopArguments, run, train_texts
from torch.utils.data import DataLoader

from stepjepa import Jepa, JepaConfig, load_model


def train(args: LoopArguments) -> list[float]:
    """Train and save; returns the loss of every step."""
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.launch()
    base, tokenizer = load_model(args.model_name, texts=train_texts(args))
    jepa = Jepa(base, tokenizer, JepaConfig(jepa_loss_type="infonce"))
    model, optimizer = fabric.setup(base, torch.optim.AdamW(base.parameters(), lr=1e-3, weight_decay=0.0))
    batches = DataLoader(args.records, batch_size=8, shuffle=args.shuffle, collate_fn=jepa.collate)
    loader: Any = fabric.setup_dataloaders(batches)

    losses = []
    model.train()
    for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), args.steps)):
        out = jepa.loss(model, batch, step=step)
        fabric.backward(out.loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        fabric.print({name: round(part.item(), 4) for name, part in out.parts.items()})
    jepa.save(args.output_dir)
    return losses


if __name__ == "__main__":
    run(train, __doc__)
