"""LLM-JEPA in a training loop of plain PyTorch. Three lines of it are ours: ``Jepa``, ``collate``, the call.

python examples/loops/plain_pytorch.py --train_file train.jsonl --steps 100 --output_dir runs/plain-pytorch
"""

from __future__ import annotations

from itertools import chain, islice, repeat

import torch
from loop_arguments import LoopArguments, run, train_texts
from torch.utils.data import DataLoader

from stepjepa import Jepa, JepaConfig, load_model


def train(args: LoopArguments) -> list[float]:
    """Train and save; returns the loss of every step."""
    model, tokenizer = load_model(args.model_name, texts=train_texts(args))
    jepa = Jepa(model, tokenizer, JepaConfig(jepa_loss_type="infonce"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader = DataLoader(args.records, batch_size=8, shuffle=args.shuffle, collate_fn=jepa.collate)

    losses = []
    model.train()
    for batch in islice(chain.from_iterable(repeat(loader)), args.steps):
        out = jepa.loss(model, batch.to(model.device))
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        print({name: round(part.item(), 4) for name, part in out.parts.items()})
    print({name: round(value, 4) for name, value in out.monitors.items()})
    jepa.save(args.output_dir)
    return losses


if __name__ == "__main__":
    run(train, __doc__)
