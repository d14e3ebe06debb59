"""Check stepjepa on a machine with a GPU: whether results are right, whether training runs, and how fast it is.

    python -m benchmarks.gpu --out OUT                       # every part; at most 8 minutes on an H100
    python -m benchmarks.gpu --out OUT --parts speed,large   # some parts; those joined by + run at the same time
    python -m benchmarks.gpu --out OUT --smoke --device cpu  # every part with small sizes, on a CPU

Call it in the root of a checkout. Each part runs in its own process, which is forked after the imports and has its own
time limit, so a crash or a hang of one part does not affect the others. A part writes its results to OUT/PART.json
after every measurement. OUT/results.json holds all parts and is renewed while they run, so a run that is ended from
outside keeps what it has. The last lines of the output are a digest. The file goes into `benchmarks/results/` as
DATE-gpu-CARD.json, from which `benchmarks/tables.py` writes its tables.
"""

from __future__ import annotations

import os
import time

BEGAN = time.perf_counter()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes would outlive a part
os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # torch.cuda.is_available() must not start CUDA before forks
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ["PYTORCH_CUDA_ALLOC_CONF"])

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from stepjepa.base.files import write_json

from .correct import part_correct
from .large import part_large
from .pieces import part_micro
from .result import Result, short
from .runs import part_train
from .speed import part_speed
from .trainers import flops_once
from .waits import part_sync
from .world import World


def part_tests(world: World, result: Result) -> None:
    """Run the project's tests that are marked for a GPU."""
    files = "tests/models/test_attention.py", "tests/models/test_varlen_attention.py"
    command = [sys.executable, "-m", "pytest", *files, "-m", "cuda", "-q", "--no-header", "-p", "no:cacheprovider"]
    try:
        most = max(result.left() - 3, 5)
        done = subprocess.run(command, capture_output=True, text=True, timeout=most, check=False)
        result.put(
            "pytest -m cuda", {"code": done.returncode, "end": done.stdout[-1500:], "errors": done.stderr[-500:]}
        )
    except subprocess.TimeoutExpired as late:
        result.put("pytest -m cuda", {"error": "no end in time", "so far": str(late.stdout)[-800:]})


PARTS = {  # name -> (its function, time limit in seconds on a GPU, the question that it answers)
    "correct": (part_correct, 100, "are losses and gradients of trees those of separate passes, with every attention?"),
    "sync": (part_sync, 40, "where does a training step wait for the device, and how busy is the device?"),
    "micro": (part_micro, 70, "how long do attention, the LM head, the monitors and collation take alone?"),
    "train": (part_train, 100, "does 'stepjepa train' run in every mode, does the loss fall, is a resumed run equal?"),
    "speed": (part_speed, 170, "how many examples a second, compared with TRL, by layout, attention and length?"),
    "large": (part_large, 70, "8B shape with LoRA: time and memory of a step, beside what --dry_run says"),
    "tests": (part_tests, 90, "do the project's tests that need a GPU pass?"),
}
DEFAULT = "correct+train+tests,speed,large,sync,micro"
NO_FORK = 77  # exit code of a part that can't use CUDA in a forked process


def run_part(name: str, world: World, seconds: float, forked: bool = True) -> None:
    """Run a part; this is the body of its process."""
    result = Result(world.out / f"{name}.json", seconds)
    function, _, question = PARTS[name]
    result.put("answers", question, say=False)
    try:
        if world.cuda:
            try:
                torch.ones(1, device="cuda").sum().item()
            except RuntimeError as error:
                if forked:
                    print(f"  no CUDA in a forked process ({str(error)[:200]}); parts are started anew", flush=True)
                    os._exit(NO_FORK)
                raise
            result.put("card", torch.cuda.get_device_name(), say=False)
            result.put("started after", round(time.perf_counter() - result.began, 1), say=False)
        if name != "correct":
            # As while JepaTrainer trains, so that TRL has the same kernels: cuDNN would plan for every new shape.
            torch.backends.cuda.enable_cudnn_sdp(False)
        with flops_once():
            function(world, result)
        result.put("complete", True, say=False)
    except BaseException as error:  # of any kind, so that it is in the file
        result.put(
            "error", {"error": f"{type(error).__name__}: {error}"[:1500], "trace": traceback.format_exc()[-2500:]}
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # skip the atexit handlers of the parent and the threads of a compile pool


def about(world: World) -> dict[str, Any]:
    """Versions and machine."""
    names = "torch transformers accelerate peft trl datasets tokenizers huggingface_hub numpy triton".split()
    facts: dict[str, Any] = {"python": sys.version.split()[0], "cpus": os.cpu_count(), "device": world.device}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts | {"cuda": torch.version.cuda}


def known_parts(text: str) -> str:
    """The argument of ``--parts``, refused if it names no part."""
    for name in text.replace("+", ",").split(","):
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}; choose from {', '.join(PARTS)}")
    return text


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--out", default="gpu-check", help="folder of the results (gpu-check)")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--smoke", action="store_true", help="small sizes in every part")
    order = "a comma waits for those before it, + does not"
    add("--parts", default=DEFAULT, type=known_parts, help=f"of {', '.join(PARTS)}; {order} ({DEFAULT})")
    add("--inline", choices=PARTS, help="run only this part, in this process")
    add("--budget", type=float, default=480, help="time limit in seconds for all parts and the imports (480)")
    return options


class Child:
    """The process of a part, with its time limit."""

    def __init__(self, name: str, world: World, seconds: float) -> None:
        self.name, self._end, self.began = name, time.perf_counter() + seconds + 15, time.perf_counter()
        self.process = multiprocessing.get_context("fork").Process(target=run_part, args=(name, world, seconds))
        self.process.start()

    def state(self, meanwhile: Callable[[], object]) -> str:
        """How the part ended; a measurement that has begun may end, but a hang is stopped."""
        while self.process.is_alive() and time.perf_counter() < self._end:
            self.process.join(5)
            meanwhile()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(3)
            self.process.kill()
            self.process.join()
            return "stopped at its limit"
        return "ended" if self.process.exitcode == 0 else f"exit code {self.process.exitcode}"


def main() -> int:
    """Run the parts, one group after the other."""
    options = parser().parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1" if options.device == "cpu" else "4")))
    with contextlib.suppress(ImportError):
        import trl

        _ = trl.SFTTrainer  # imported before the forks
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    if options.device == "cuda" and torch.cuda.is_initialized():
        print("note: an import has initialised CUDA before the fork; parts will fail", flush=True)
    world = World(options)
    head = about(world) | {"import and data s": round(time.perf_counter() - BEGAN, 1)}
    print(json.dumps(head), flush=True)
    states: dict[str, Any] = {}  # of the parts, with the seconds that they took
    gather = partial(write_results, world.out, head, states)
    if options.inline:
        run_part(options.inline, world, options.budget, forked=False)
    for group in options.parts.split(","):
        left = options.budget - (time.perf_counter() - BEGAN)
        children = []
        for name in group.split("+"):
            _, limit, question = PARTS[name]
            seconds = min(120 if options.smoke else limit, left)
            if seconds < 10:
                states[name] = "no time left"
                continue
            print(f"== {name}: {question} (at most {seconds:.0f} s)", flush=True)
            children.append(Child(name, world, seconds))
        for child in children:
            state = child.state(gather)
            if state == f"exit code {NO_FORK}":
                again = [*sys.argv[1:], "--inline", child.name, "--budget", str(PARTS[child.name][1])]
                subprocess.run([sys.executable, "-m", "benchmarks.gpu", *again], check=False)
            states[child.name] = {"state": state, "s": round(time.perf_counter() - child.began, 1)}
        gather()
    shutil.rmtree(world.scratch, ignore_errors=True)
    print(digest(world.out, states), flush=True)
    return 0


def read(out: Path, name: str) -> dict[str, Any]:
    """What a part has written; nothing if it did not run."""
    path = out / f"{name}.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values


def write_results(out: Path, about: dict[str, Any], states: dict[str, Any]) -> None:
    """Write all that the parts have measured so far into one file, which a run that is ended from outside leaves."""
    parts = {name: values for name in PARTS if (values := read(out, name))}
    write_json(out / "results.json", {"about": about, "states": states, "parts": parts})


def digest(out: Path, states: dict[str, Any]) -> str:
    """The summary at the end of the output: errors, and one line for each result of the main parts."""
    lines = ["", "==== digest ====", json.dumps(states)]
    for name in PARTS:
        values = read(out, name)
        results = {key: value for key, value in values.items() if isinstance(value, dict)}
        lines += [
            f"ERROR {name} / {key}: {str(value['error'])[:300]}" for key, value in results.items() if "error" in value
        ]
        results = {key: value for key, value in results.items() if "error" not in value}
        if name == "correct" and values:
            lines.append(f"correct: passes {values.get('passes')}, worst {values.get('worst float32')}")
        if name == "sync":
            shown = {key: {k: v for k, v in value.items() if k != "where"} for key, value in results.items()}
            lines += [f"sync: {key}: {short(value, 200)}" for key, value in shown.items()]
        if name == "train":
            lines += [f"train: {key}: {short(value, 150)}" for key, value in results.items()]
        if name == "speed":
            lines += [
                f"speed: {key}: {short(value, 700)}" for key, value in results.items() if key.startswith("over TRL")
            ]
        if name == "large":
            keys = ("median", "peak GiB", "dry run, sum", "MFU, computed")
            lines += [
                f"large: {key}: {short({k: value[k] for k in keys if k in value})}" for key, value in results.items()
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
