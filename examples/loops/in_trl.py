"""LLM-JEPA in TRL's ``SFTTrainer``: one method is overridden.

python examples/loops/in_trl.py --train_file train.jsonl --steps 100 --output_dir runs/trl
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from loop_arguments import LoopArguments, run, train_texts
from trl import SFTConfig, SFTTrainer

from stepjepa import Jepa, JepaConfig, load_model


class JepaSFTTrainer(SFTTrainer):
    """SFTTrainer with the loss of ``jepa``."""

    def __init__(self, *args: Any, jepa: Jepa, **kwargs: Any) -> None:
        super().__init__(*args, data_collator=jepa.collate, **kwargs)
        self.jepa = jepa

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As in Trainer; every micro-batch is a mean of its own."""
        out = self.jepa.loss(model, inputs, step=self.state.global_step)
        return (out.loss, out) if return_outputs else out.loss


def train(args: LoopArguments) -> list[float]:
    """Train and save; returns the loss of every step."""
    model, tokenizer = load_model(args.model_name, texts=train_texts(args))
    bf16 = torch.cuda.is_available()
    config, autocast = JepaConfig(jepa_loss_type="infonce"), torch.bfloat16 if bf16 else None
    jepa = Jepa(model, tokenizer, config, autocast=autocast)
    settings = SFTConfig(
        str(args.output_dir),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="random" if args.shuffle else "sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        # Batches are made by ``jepa.collate`` from whole records.
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    data = Dataset.from_list([{"messages": list(record.messages)} for record in args.records])
    trainer = JepaSFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, jepa=jepa)
    trainer.train()
    jepa.save(args.output_dir)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    run(train, __doc__)
