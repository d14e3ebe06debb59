"""Stands for ``python -m stepjepa`` in tests of sweeps: trains by adding numbers, with checkpoints, in no time.

``--fail_in STAGE --cure FILE`` makes a stage fail until the file is there; ``--slow S`` makes each of the six steps of
a training take S seconds; ``--told`` says each step; ``--silent`` keeps an evaluation from writing anything;
the environment variable FAKE_SLOW goes before ``--slow``. Two trainings at once in one folder are found out, and fail.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

STEPS = 6


def flags_of(arguments):
    found = {}
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            found[name] = value
        else:
            found[name] = argument
    return found


def write(path, value):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def fail_unless_cured(flags, stage):
    if flags.get("fail_in") == stage and not Path(flags["cure"]).exists():
        print(f"{stage} can't\nreason   of {stage}", flush=True)
        sys.exit(3)


def train(flags):
    run = Path(flags["output_dir"])
    points = [path for path in run.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    if flags.get("resume_from_checkpoint") is None and run.exists() and any(run.iterdir()):
        sys.exit(f"{run} is not empty")
    run.mkdir(parents=True, exist_ok=True)
    # Two trainings at once in one folder would be a fault of the sweep.
    busy = (run / "busy").open("w")
    try:
        fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("two at work at once")
    with (run / "pids.txt").open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    step, total = 0, int(flags["finetune_seed"])
    if points:
        last = max(points, key=lambda path: int(path.name.split("-")[1]))
        state = json.loads((last / "trainer_state.json").read_text())
        step, total = state["global_step"], state["total"]
    write(run / "run.json", {"status": "running"})
    fail_unless_cured(flags, "train")
    while step < STEPS:
        time.sleep(float(os.environ.get("FAKE_SLOW", flags.get("slow", 0))))
        step, total = step + 1, (total * 31 + int(flags.get("lbd", 7)) + step) % 1000
        if "told" in flags:
            print(f"step {step}/{STEPS}  LM loss: {total}, {STEPS - step} s left", flush=True)
        if step % 2 == 0:
            (run / f"checkpoint-{step}").mkdir(exist_ok=True)
            # A file of no tensors and archives of no files: whole, as far as anybody can tell.
            (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
            for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
                (run / f"checkpoint-{step}" / name).write_bytes(b"PK\5\6" + bytes(18))
            write(run / f"checkpoint-{step}" / "trainer_state.json", {"global_step": step, "total": total})
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    results = {"steps": STEPS, "tokens": total, "train_seconds": 1, "environment": environment}
    jepa = {"mode": "regular", "predictors": 0}
    told = {"model": "fake", "training": {"seed": int(flags["finetune_seed"])}, "data": {}}
    write(run / "run.json", {"status": "finished", "jepa": jepa, "results": results, **told})


def evaluate(flags):
    run = Path(flags["model_path"])
    value = json.loads((run / "run.json").read_text())["results"]["tokens"] / 1000
    fail_unless_cured(flags, "evaluate")
    time.sleep(float(flags.get("slow", 0)))
    if "silent" in flags:
        return
    line = {"stopped": value, "scores": {"correct": value, "contains": value}}
    lines = "".join(json.dumps({"index": index, **line}) + "\n" for index in range(3))
    Path(flags["output_file"]).write_text(lines)
    scores = {name: {"mean": value, "low": 0, "high": 1} for name in ("correct", "contains", "stopped")}
    summary = {
        "headline": "correct",
        "lenient": "contains",
        "scores": scores,
        "gold_loss": value,
        "n": 3,
        "task": "generic",
    }
    write(Path(flags["output_file"]).with_suffix(".summary.json"), {**summary, "test_fingerprint": "same"})


if __name__ == "__main__":
    print("started", flush=True)
    {"train": train, "evaluate": evaluate}[sys.argv[1]](flags_of(sys.argv[2:]))
