"""Stands for ``python -m stepjepa`` in tests of sweeps: trains by adding numbers, with checkpoints, in no time.

``--fail_in STAGE --cure FILE`` makes a stage fail until the file is there; ``--slow S`` makes each of the six steps of
a training take S seconds; the environment variable FAKE_SLOW goes before it. Two trainings at once in one folder fail.
``--refuse TEXT`` stands for settings or data that are refused before anything is written.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

STEPS = 6


def flags_of(arguments):
    result = {}
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            result[name] = value
        else:
            result[name] = argument
    if "config" in result:  # without PyYAML, which is not there without site packages
        lines = Path(result["config"]).read_text().splitlines()
        result |= dict(line.split(": ", 1) for line in lines)
    return result


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
    if "refuse" in flags:
        print(flags["refuse"], flush=True)
        sys.exit(2)
    assert flags["resume_from_checkpoint"] == "auto"
    if run.exists() and any(run.iterdir()) and not (run / "run.json").exists():
        sys.exit(f"{run} is not empty")
    run.mkdir(parents=True, exist_ok=True)
    write(run / "run.json", {"status": "running"})
    busy = (run / "busy").open("w")
    try:
        fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("two at work at once")
    with (run / "pids.txt").open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    begin = {"step": 0, "total": int(flags["finetune_seed"])}
    points = [json.loads(path.read_text()) for path in run.glob("checkpoint-*.json")]
    last = max(points, key=lambda point: point["step"], default=begin)
    step, total = last["step"], last["total"]
    print(f"resumed at step {step}", flush=True)
    fail_unless_cured(flags, "train")
    while step < STEPS:
        time.sleep(float(os.environ.get("FAKE_SLOW", flags.get("slow", 0))))
        step, total = step + 1, (total * 31 + int(flags.get("lbd", 7)) + step) % 1000
        if step % 2 == 0:
            write(run / f"checkpoint-{step}.json", {"step": step, "total": total})
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    results = {"steps": STEPS, "tokens": total, "train_seconds": 1, "environment": environment}
    message = {"model": "fake", "training": {"seed": int(flags["finetune_seed"])}, "data": {}}
    write(run / "run.json", {"status": "finished", "jepa": {"mode": "regular"}, "results": results, **message})


def evaluate(flags):
    run = Path(flags["model_path"])
    value = json.loads((run / "run.json").read_text())["results"]["tokens"] / 1000
    fail_unless_cured(flags, "evaluate")
    line = {"stopped": value, "scores": {"correct": value, "contains": value}}
    lines = "".join(json.dumps({"index": index, **line}) + "\n" for index in range(3))
    Path(flags["output_file"]).write_text(lines)
    scores = {name: {"mean": value, "low": 0, "high": 1} for name in ("correct", "contains", "stopped")}
    message = {"headline": "correct", "lenient": "contains", "n": 3, "task": "generic", "test_fingerprint": "same"}
    write(Path(flags["output_file"]).with_suffix(".summary.json"), {"scores": scores, "gold_loss": value, **message})


if __name__ == "__main__":
    print("started", flush=True)
    {"train": train, "evaluate": evaluate}[sys.argv[1]](flags_of(sys.argv[2:]))
