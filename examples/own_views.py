"""Custom views in thirty lines: the question predicts the last step, whatever is in between. Offline, on a CPU.

What predicts what is a matter of your data. A record may say so itself, with 'text' (the source) and 'code' (the
target) beside its messages; they may be any texts and need not stand in the messages. Here 'text' is the question and
'code' the last paragraph of the solution. The same model is trained twice, with weight 0 on the views and with InfoNCE
on them.

What you should see: on held-out records matched views are no more alike than shuffled ones without the objective
(cosine 0.12 both), and far more with it (0.95 and 0.14); the LM loss is somewhat higher with it. What it does not show:
that this choice of views helps the answers. None are generated here.

The line that starts with ``$`` is a command that you can run yourself; the rest is Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shown import arguments, command
from transformers import TrainingArguments

from stepjepa import JepaConfig, JepaTrainer, Record, load_model, read_records


def with_views(record: Record) -> dict[str, Any]:
    """Return a record with custom views."""
    question, solution = record.messages[-2]["content"], record.answer
    last = solution.split("\n\n")[-1]
    return {"messages": record.messages, "text": question, "code": last}


def train(folder: Path, data: Path, lbd: float, steps: int) -> dict[str, float]:
    """Train with the views at a weight; returns what was measured on held-out records."""
    records = [with_views(record) for record in read_records(data / "train.jsonl")]
    held_out = [with_views(record) for record in read_records(data / "test.jsonl")]
    texts = [message["content"] for record in records for message in record["messages"]]
    model, tokenizer = load_model("preset:tiny", texts=texts)
    options = {"save_strategy": "no", "report_to": "none", "dataloader_pin_memory": False}
    trainer = JepaTrainer(
        model,
        TrainingArguments(str(folder), max_steps=steps, learning_rate=3e-3, **options),
        JepaConfig(mode="llm-jepa", predictors=1, jepa_loss_type="infonce", lbd=lbd),
        train_dataset=records,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.evaluate()


def run(folder: Path, *, tiny: bool = False) -> None:
    """Make data, train without and with the objective, print what was measured."""
    sizes = "--train_size 16 --test_size 8" if tiny else "--train_size 4000 --test_size 200"
    command(f"prepare stepmath --output_dir {folder}/data {sizes} --max_steps 2")
    measured = {lbd: train(folder / f"lbd-{lbd}", folder / "data", lbd, 2 if tiny else 300) for lbd in (0.0, 0.1)}
    print("\nheld-out records     LM loss   matched   shuffled")
    for lbd, values in measured.items():
        row = (values[f"eval_{name}"] for name in ("lm_loss", "matched_similarity", "shuffled_similarity"))
        print(f"lbd {lbd:<14}" + "".join(f"{value:10.3f}" for value in row))


if __name__ == "__main__":
    args = arguments(__doc__, "own-views")
    run(args.output_dir, tiny=args.tiny)
