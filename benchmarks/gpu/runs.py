"""``stepjepa train`` in every mode on a random model, and a resumed run against one that was not interrupted."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from stepjepa import Jepa
from stepjepa.cli.main import main as stepjepa

from .result import Result, compiled, peak_memory, quiet, rounded, wait
from .trainers import make_trainer
from .world import World, build, jepa_config, make_records, shape_config

SHOWN = "encoding", "same FLOPs", "FLOPs of step 1:"
"""Beginnings of the lines of a run's output that are kept."""


def part_train(world: World, result: Result) -> None:
    """Run ``stepjepa train`` in every mode on a random model, and resume a run."""
    folder, data = world.scratch / "model", world.scratch / "train.jsonl"
    shape, length, steps, batch = world.sizes(("0.3B", 256, 24, 16), ("toy", 60, 6, 4))
    tokenizer = world.fresh_tokenizer()
    shape_config(shape, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    records = make_records(world.sizes(640, 32), length)
    data.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    common = ["--train_file", str(data), "--model_name", str(folder), "--pretrain", "--max_steps", str(steps),
              "--batch_size", str(batch), "--grad_accum", "1", "--learning_rate", "1e-3", "--logging_steps", "2",
              "--max_length", "2048", "--save_strategy", "no", "--no_cache", "--report_to", "none"]  # fmt: skip
    common += ["--bf16", "true"] if world.cuda else ["--use_cpu", "true"]
    runs = {  # those first that a time limit has cut off so far
        "ema, head": ["--layout", "branched", "--infonce", "--target_grad", "ema", "--predictor_head", "mlp"],
        "branched infonce": ["--layout", "branched", "--infonce"],
        "all terms, measured FLOPs": ["--layout", "branched", "--infonce", "--prompt_loss_weight", "0.1",
                                      "--sigreg", "0.05", "--stp", "0.02", "--variance", "1",
                                      "--pooling", "mean", "--track_flop"],
        "same flop": ["--layout", "branched", "--infonce", "--same_flop", "--num_epochs", "1"],
        "separate cosine": ["--jepa_loss_type", "cosine"],
        "inplace": ["--step_jepa", "--layout", "inplace", "--infonce"],
        "checkpointing": ["--layout", "branched", "--infonce", "--gradient_checkpointing", "true"],
        "rows": ["--layout", "branched", "--infonce", "--encoding", "rows"],
        "regular": ["--regular"],
        "step, all pairs": ["--step_jepa", "--pairs", "all", "--infonce"],
        "branched, mask": ["--layout", "branched", "--infonce", "--attn_implementation", "tree_sdpa"],
        "branched, flex": ["--layout", "branched", "--infonce", "--attn_implementation", "flex_attention"],
    }  # fmt: skip
    if not world.cuda:
        runs = {
            name: given
            for name, given in runs.items()
            if name in ("regular", "branched infonce", "same flop", "ema, head", "all terms, measured FLOPs")
        }
    for number, (name, given) in enumerate(runs.items()):
        if number == 1:
            with result.trying("embed and answer", needs=10 if world.cuda else 0) as go:
                if go:
                    result.put("embed and answer", inference(world, shape))
        if number == 3:
            with result.trying("resume", needs=15 if world.cuda else 0) as go:
                if go:
                    resumed(world, result, shape)
        with result.trying(name, needs=8 if world.cuda else 0) as go:
            if not go:
                continue
            out, start, graphs = world.scratch / f"cli-{abs(hash(name))}", time.perf_counter(), compiled()
            flags = [*common]
            if "--same_flop" in given:
                at = flags.index("--max_steps")
                flags = flags[:at] + flags[at + 2 :]
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                code = stepjepa(["train", *flags, *given, "--output_dir", str(out)])
            seconds = time.perf_counter() - start
            if code:
                result.put(name, {"error": text.getvalue()[-1200:], "code": code})
                continue
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            lines = [line for line in lines if "lm_loss" in line]
            losses = [line["lm_loss"] for line in lines]
            if not losses:
                result.put(name, {"error": "no line of metrics.jsonl has an lm_loss", "last": text.getvalue()[-400:]})
                continue
            third = max(len(losses) // 3, 1)
            first, last = statistics.mean(losses[:third]), statistics.mean(losses[-third:])
            result.put(name, {
                "falls": last < first, "lm loss": [rounded(first), rounded(last)],
                "jepa loss": [rounded(line["jepa_loss"]) for line in (lines[0], lines[-1]) if "jepa_loss" in line],
                "tokens/s": rounded(statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 2 :])),
                "s": round(seconds, 1), "graphs": compiled() - graphs, "peak GiB": peak_memory(reset=True),
                "screen": [row for row in text.getvalue().splitlines() if row.startswith(SHOWN)],
            })  # fmt: skip
            shutil.rmtree(out, ignore_errors=True)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()


def resumed(world: World, result: Result, shape: str) -> None:
    """Compare a run that was resumed in the middle with one that was not, and two equal runs with each other."""
    records = make_records(world.sizes(128, 16), world.sizes(256, 60))
    arm = {"mode": "llm-jepa", "layout": "branched", "target_grad": "ema", "predictor_head": "linear"}
    changes = world.sizes({"num_hidden_layers": 2}, {})
    steps, half, batch = world.sizes((11, 6, 8), (3, 2, 4))
    measured: dict[str, Any] = {}

    def run(output: str, checkpoint: str | None = None, deterministic: bool = False) -> tuple[Any, list[float]]:
        torch.manual_seed(7)
        model = build(shape, world.tokenizer, world.device, **changes)
        trainer, _ = make_trainer(world, shape, arm, records, steps=steps, batch=batch, model=model, logging=1,
                                  save_strategy="steps", save_steps=half, output_dir=output)  # fmt: skip
        with quiet():
            start = time.perf_counter()
            trainer.train(resume_from_checkpoint=checkpoint)
            wait()
        measured.setdefault("s", []).append(round(time.perf_counter() - start, 1))
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        weights = torch.cat([p.detach().flatten().double().cpu() for p in trainer.model.parameters()])
        return weights, losses

    output = str(world.scratch / "resume")
    first, losses = run(output)
    size = sum(each.stat().st_size for each in Path(output, f"checkpoint-{half}").iterdir())
    again, _ = run(str(world.scratch / "twice"))
    moved, resumed_losses = run(output, str(Path(output, f"checkpoint-{half}")))
    distance = lambda other: rounded(float((other - first).norm() / first.norm()), 3)  # noqa: E731
    measured |= {"resumed from the middle, weights": distance(moved), "the same run twice, weights": distance(again),
              "last losses": [losses[-1], resumed_losses[-1]], "checkpoint GiB": rounded(size / 2**30)}  # fmt: skip
    for name in ("resume", "twice"):
        shutil.rmtree(world.scratch / name, ignore_errors=True)
    result.put("resume", measured)


def inference(world: World, shape: str) -> dict[str, Any]:
    """Embed and answer on the device in both precisions, and compare the embeddings with those of the CPU."""
    records = make_records(world.sizes(64, 8), world.sizes(256, 60), seed=11)
    questions = [record["messages"][1]["content"] for record in records]
    changes = world.sizes({"num_hidden_layers": 2}, {})
    measured: dict[str, Any] = {}
    of_cpu = None
    for device, dtype in (("cpu", "float32"), (world.device, "float32"), (world.device, "bfloat16")):
        # Made on the CPU: the random numbers of other devices are other ones.
        model = build(shape, world.tokenizer, "cpu", **changes).to(device, getattr(torch, dtype)).eval()
        jepa = Jepa(model, world.tokenizer, jepa_config({"layout": "branched"}), device=device)
        jepa.embed(questions[:4])
        start = time.perf_counter()
        vectors = jepa.embed(questions)
        seconds = time.perf_counter() - start
        if of_cpu is None:
            of_cpu = vectors
            continue
        start = time.perf_counter()
        answers = jepa.answers(questions[:8], max_new_tokens=16)
        measured[dtype] = {
            "off by": rounded(float(abs(vectors - of_cpu).max()), 3), "texts/s": rounded(len(questions) / seconds),
            "answers": len(answers), "s of 8 answers": rounded(time.perf_counter() - start, 3),
        }  # fmt: skip
    return measured
