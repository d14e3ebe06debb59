"""LLM-JEPA with Accelerate: several processes, accumulation, any precision.

accelerate launch examples/loops/in_accelerate.py --train_file train.jsonl --steps 100 --output_dir runs/accelerate
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain, islice, repeat

import torch
from accelerate import Accelerator
from loop_arguments import LoopArguments, run, train_texts
from torch.utils.data import DataLoader

from stepjepa import Jepa, JepaConfig, load_model

BATCH_SIZE, ACCUMULATION = 8, 1


def train(args: LoopArguments) -> list[float]:
    """Train and save; returns the loss of every step, of this process."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    base, tokenizer = load_model(args.model_name, texts=train_texts(args))
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    jepa = Jepa(base, tokenizer, JepaConfig(jepa_loss_type="infonce"), autocast=autocast)
    loader = DataLoader(args.records, batch_size=BATCH_SIZE, shuffle=args.shuffle, collate_fn=jepa.collate)
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-3, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(base, optimizer, loader)

    losses = []
    model.train()
    batches = chain.from_iterable(repeat(loader))
    for _ in range(args.steps):
        step = list(islice(batches, ACCUMULATION))
        counts = jepa.counts(step)  # of all batches and processes, so that the step's mean is that of one large batch
        for batch in step:
            with nullcontext() if batch is step[-1] else accelerator.no_sync(model):
                out = jepa.loss(model, batch, counts)
                accelerator.backward(out.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        accelerator.print({name: round(part.item(), 4) for name, part in out.parts.items()})
    if accelerator.is_main_process:
        jepa.save(args.output_dir)
    return losses


if __name__ == "__main__":
    run(train, __doc__)
