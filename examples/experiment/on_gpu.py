"""Arms of a grid on one GPU, several at a time and within a time limit; the results are packed without the weights.

    mkdir -p runs/experiment
    ln -s "$(python examples/smollm2.py | tail -n 1)" runs/experiment/smollm2-135m-instruct
    python examples/experiment/on_gpu.py examples/experiment/smollm2-recipe.yaml --seconds 600 --jobs 6

A step of a small model keeps a GPU busy for a part of its time only, so several arms share one: on an H100 a step of
SmolLM2-135M took 0.11 s whether one run or five trained. Each arm is a sweep of its own, ``runs/on-gpu/ARM-SEED/GRID``,
beside whose evaluation ``retrieval.py`` runs. Arms begin in the order of the grid; the archive is renewed after each.
Where it is unpacked, ``collect.py`` takes the sweeps, and ``retrieval.csv`` has the retrieval of all arms:

    tar xzf runs/on-gpu.tar.gz -C runs
    python examples/experiment/collect.py runs/on-gpu/*/smollm2-recipe
    cp runs/on-gpu/retrieval.csv examples/experiment/smollm2-recipe.csv

The grid of SmolLM2 with LoRA, ``retrieval-smollm2.yaml``, names what it trains on and asks:

    python examples/experiment/data.py --data_dir ../shared/data/llm_jepa --output_dir runs/experiment
    python examples/experiment/on_gpu.py examples/experiment/retrieval-smollm2.yaml --data smollm2 --layers 0 15 30 \\
        --seconds 600 --jobs 9
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from collect import trained
from ranking import DATA

from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, read_text
from stepjepa.store.folder import METRICS_FILE
from stepjepa.study.grid import read_grid
from stepjepa.study.local import Child
from stepjepa.study.sweep_folder import LAUNCHER

HERE = Path(__file__).resolve().parent
LEFT_OUT = (".safetensors", ".bin", ".pt", "tokenizer.json")
"""Ends of the names of files that are not packed."""
WINDOW = 10.0
"""Seconds over which the pace of a training is measured."""
WAITS, TRAINS, ANSWERS, FAILED = "waits", "trains", "answers and retrieves", "failed"
"""States of an arm; others say how it ended."""


@dataclass
class Arm:
    """An arm with a seed: its sweep, which trains and evaluates it, and its retrieval after the training."""

    name: str
    seed: int
    grid: Path
    folder: Path  # of its sweep, of the table of its retrieval and of the log of both
    epochs: float
    began: float = 0.0
    took: float | None = None  # seconds from its beginning to its end, once it is finished
    running: list[Child] = field(default_factory=list)
    readings: list[tuple[float, float]] = field(default_factory=list)  # times, and epochs that were trained by then
    state: str = WAITS

    @property
    def label(self) -> str:
        """Its name and seed."""
        return f"{self.name}-{self.seed}"

    @property
    def sweep(self) -> Path:
        """The folder of its sweep, which is called as the grid: so ``collect.py`` calls the file of figures."""
        return self.folder / self.grid.stem

    @property
    def run_folder(self) -> Path:
        """The folder of its run."""
        return self.sweep / self.name / f"seed{self.seed}"

    @property
    def table(self) -> Path:
        """The rows that ``retrieval.py`` writes."""
        return self.folder / "retrieval.csv"

    def start(self, command: Sequence[str]) -> None:
        """Run a command with the output in the log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            # One GPU, which all share, and a thread for each process.
            environment = {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1", **os.environ}
            self.running.append(Child(command, log, environment))

    def train(self) -> None:
        """Begin the training, which an evaluation follows."""
        self.state, self.began = TRAINS, time.monotonic()
        only = ["--only", f"{self.name},{self.seed}", "--seeds", str(self.seed)]
        self.start([*LAUNCHER, "sweep", "--config", str(self.grid), "--output_dir", str(self.sweep), *only])

    def retrieve(self, options: Sequence[str]) -> None:
        """Begin the retrieval, with these options of ``retrieval.py``; the sweep evaluates meanwhile."""
        self.state = ANSWERS
        self.start([sys.executable, str(HERE / "retrieval.py"), str(self.sweep), "--file", str(self.table), *options])

    def end(self, reason: str) -> None:
        """End its processes."""
        for child in self.running:
            child.kill()
        self.running, self.state = [], reason

    def read(self, now: float) -> None:
        """Note how far the training is."""
        metrics = self.run_folder / METRICS_FILE
        lines = read_text(metrics).splitlines() if metrics.exists() else []
        self.readings.append((now, float(json.loads(lines[-1]).get("epoch", 0)) if lines else 0.0))

    def end_of_training(self) -> float | None:
        """Return the time at which the training ends, at the pace of the last seconds; None if it is not known yet."""
        now, done = self.readings[-1]
        earlier = [each for each in self.readings if each[0] <= now - WINDOW]
        if not earlier or earlier[-1][1] in (0.0, done):
            return None
        then, before = earlier[-1]
        return now + (self.epochs - done) * (now - then) / (done - before)


@dataclass
class Shared:
    """The arms on one GPU.

    Args:
        arms: by importance.
        jobs: arms at a time.
        seconds: when everything is ended.
        retrieval: options of ``retrieval.py``.
        folder: of the arms.
        archive: file of the results.
    """

    arms: list[Arm]
    jobs: int
    seconds: float
    retrieval: list[str]
    folder: Path
    archive: Path
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def running(self) -> list[Arm]:
        """The arms that have begun and not ended."""
        return [arm for arm in self.arms if arm.running]

    def run(self) -> int:
        """Run the arms; returns the exit code, 1 if one failed."""
        watched = self.began
        try:
            while (now := time.monotonic()) < self.began + self.seconds:
                for arm in self.running():
                    self.go_on(arm)
                self.begin(now)
                if not self.running():
                    break
                if now > watched + WINDOW / 2:
                    watched = now
                    self.watch(now)
                time.sleep(0.1)
        finally:
            for arm in self.running():
                self.end(arm, f"ended by the time limit, {arm.state}")
            self.pack()
        self.say("; ".join(f"{arm.label}: {arm.state}" for arm in self.arms))
        return int(any(arm.state == FAILED for arm in self.arms))

    def begin(self, now: float) -> None:
        """Begin waiting arms in the free places, unless less time is left than the quickest one took."""
        took = [arm.took for arm in self.arms if arm.took is not None]
        if took and now + min(took) > self.began + self.seconds:
            return
        for arm in [arm for arm in self.arms if arm.state == WAITS][: self.jobs - len(self.running())]:
            arm.train()
            self.say(f"{arm.label}: begins")

    def go_on(self, arm: Arm) -> None:
        """Begin the retrieval of an arm that is trained; pack the results of one whose processes have ended."""
        codes = [child.exit_code() for child in arm.running]
        if any(codes):
            self.end(arm, FAILED)
            self.say(f"see {arm.folder / 'log'}")
        elif arm.state == TRAINS and trained(arm.run_folder):
            self.say(f"{arm.label}: trained after {time.monotonic() - arm.began:.0f} s")
            arm.retrieve(self.retrieval)
        elif all(code == 0 for code in codes):
            arm.took = time.monotonic() - arm.began
            self.end(arm, f"finished after {arm.took:.0f} s")
            self.pack()

    def end(self, arm: Arm, state: str) -> None:
        """End the processes of an arm, and say why."""
        arm.end(state)
        self.say(f"{arm.label}: {state}")

    def watch(self, now: float) -> None:
        """Print how far each training is, and when the last one ends at the pace of the last seconds."""
        training = [arm for arm in self.running() if arm.state == TRAINS]
        if not training:
            return
        for arm in training:
            arm.read(now)
        ends = [time - self.began for arm in training if (time := arm.end_of_training()) is not None]
        shares = (f"{arm.label} {arm.readings[-1][1] / arm.epochs:.0%}" for arm in training)
        self.say(f"trained: {', '.join(shares)}" + (f"; all at {max(ends):.0f} s" if ends else ""))

    def pack(self) -> None:
        """Write the archive, and the rows of retrieval of all arms in one file."""
        # As text, so that no number changes.
        tables = [pd.read_csv(arm.table, dtype=str, keep_default_na=False) for arm in self.arms if arm.table.exists()]
        if tables:
            rows = pd.concat(tables).sort_values(["arm", "seed", "method"])
            with atomic_write(self.folder / "retrieval.csv") as stream:
                rows.to_csv(stream, index=False, lineterminator="\n")
        part = self.folder.with_name(f"{self.folder.name}.part")
        with tarfile.open(part, "w:gz", compresslevel=6) as packed:
            for path in sorted(self.folder.rglob("*")):
                if path.is_file() and not path.name.endswith(LEFT_OUT):
                    packed.add(path, f"{self.folder.name}/{path.relative_to(self.folder)}")
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(part, self.archive)


def main(argv: list[str] | None = None) -> int:
    """Run the arms and pack their results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, metavar="GRID", help="YAML file of the grid")
    parser.add_argument("--seconds", type=float, required=True, metavar="S", help="when everything is ended")
    parser.add_argument("--jobs", type=int, default=6, metavar="N", help="arms at a time (%(default)s)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms, instead of all")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds, instead of those of the grid")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/on-gpu"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="(the folder's name with .tar.gz)")
    parser.add_argument("--data", choices=list(DATA), default="synth", help="what the grid trains on (synth)")
    parser.add_argument("--layers", type=int, nargs="+", default=[], metavar="N", help="of plain models (all)")
    args = parser.parse_args(argv)
    try:
        grid = read_grid(args.grid, args.seeds)
    except UserError as error:
        parser.error(str(error))
    named = args.arms or list(grid.arms)
    if unknown := sorted({*named} - {*grid.arms}):
        parser.error(f"--arms: there is no arm '{unknown[0]}'; name some of {', '.join(grid.arms)}")
    if args.output_dir.exists():
        parser.error(f"--output_dir: {args.output_dir} already exists; name another folder")
    args.output_dir.mkdir(parents=True)
    arms = []
    for seed in grid.seeds:
        for name in named:
            epochs = float({**grid.train, **grid.arms[name]}["num_epochs"])
            arms.append(Arm(name, seed, args.grid, args.output_dir / f"{name}-{seed}", epochs))
    options = ["--data", args.data, *(["--layers", *map(str, args.layers)] if args.layers else [])]
    archive = args.archive or args.output_dir.with_name(f"{args.output_dir.name}.tar.gz")
    # Ended from outside, it still packs what there is.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return Shared(arms, args.jobs, args.seconds, options, args.output_dir, archive).run()
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    raise SystemExit(main())
