"""What a training run writes while it goes: a console line, ``metrics.jsonl``, a warning on collapse."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from stepjepa.files import atomic_write
from stepjepa.objectives.monitors import COLLAPSE_PAIRS, COLLAPSE_RANK, COLLAPSE_SIMILARITY, REMEDIES
from stepjepa.objectives.term import TERMS
from stepjepa.run_folder import METRICS_FILE
from stepjepa.terminal import duration

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


def console_line(logs: dict[str, float]) -> str | None:
    """One line for people out of a line of logs; None for logs that are not losses."""
    prefix = "eval_" if "eval_lm_loss" in logs else ""
    if f"{prefix}lm_loss" not in logs:
        return None
    parts = [f"{term.words}: {logs[prefix + name]:.4f}" for name, term in TERMS.items() if prefix + name in logs]
    parts.append(f"Total: {logs[f'{prefix}loss']:.4f}")
    if f"{prefix}matched_similarity" in logs:
        shuffled = logs.get(f"{prefix}shuffled_similarity")
        other = "–" if shuffled is None else f"{shuffled:.3f}"
        parts.append(f"cos matched/shuffled: {logs[f'{prefix}matched_similarity']:.3f}/{other}")
    if f"{prefix}source_rank" in logs:
        parts.append(f"rank: {logs[f'{prefix}source_rank']:.1f}/{logs[f'{prefix}target_rank']:.1f}")
    parts += [
        f"{name.removeprefix('eval_answer_')}: {value:.3f}"
        for name, value in logs.items()
        if name.startswith("eval_answer_")
    ]
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    if "pairs_per_second" in logs:
        parts.append(f"{logs['pairs_per_second']:,.1f} pairs/s")
    return ("eval  " if prefix else "") + ", ".join(parts)


MEASURED = 4
"""Steps behind the first one by which the time of a run is told; the first pays for what is made once."""


class ConsoleCallback(TrainerCallback):
    """A line of losses for every line of logs; on a terminal a bar with rate and time left, else that in the lines.

    Once the first steps are measured, a line tells how long the run will take, evaluations left out.

    Args:
        bars: draw a bar, on standard error.
        clock: seconds since some moment.
    """

    @classmethod
    def install(cls, trainer: Trainer) -> None:
        """Take the place of the callback that prints logs."""
        for standard in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(standard)
        trainer.add_callback(cls(bars=not trainer.args.disable_tqdm))

    def __init__(self, bars: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bars = bars
        self._clock = clock
        self._bar: tqdm[Any] | None = None
        self._first = 0
        self._seconds = 0.0
        self._begun = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar."""
        self._first, self._seconds, self._begun = state.global_step, 0.0, self._clock()
        if self._bars and state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="train", unit="step", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar; tell the time of the run once it is known."""
        done, now = state.global_step - self._first, self._clock()
        if done > 1:
            self._seconds += now - self._begun
        self._begun = now
        if not state.is_world_process_zero:
            return
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)
        left = self._left(state)
        if done == 1 + MEASURED and left is not None:
            steps = state.max_steps - state.global_step
            rest = "" if args.eval_strategy == "no" else ", and evaluations"
            self._write(
                f"time: about {duration(left)} for the {steps:,} steps left, {duration(left / steps)} each{rest}"
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the time since the last step out of that of the next."""
        self._begun = self._clock()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same."""
        self._begun = self._clock()

    def _left(self, state: Any) -> float | None:
        """Seconds that the steps to come will take; None while that is not known, and at the end."""
        measured = state.global_step - self._first - 1
        steps = state.max_steps - state.global_step
        return self._seconds / measured * steps if measured >= 1 and steps > 0 else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Print the line."""
        line = console_line(logs or {})
        if line is None or not state.is_world_process_zero:
            return
        left = None if self._bar is not None or "loss" not in (logs or {}) else self._left(state)
        self._write(f"step {state.global_step}/{state.max_steps}  {line}{f', {duration(left)} left' if left else ''}")

    def _write(self, line: str) -> None:
        # Above the bar, where there is one.
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)


def _step_of(line: bytes) -> int | None:
    """The step of a line of ``metrics.jsonl``; None where it is no object that names one."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


class MetricsCallback(TrainerCallback):
    """Appends every line of logs to ``metrics.jsonl`` in the run folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On a resume drop what was logged after the checkpoint: those steps are run again."""
        path = Path(args.output_dir) / METRICS_FILE
        if not state.is_world_process_zero or not path.exists():
            return
        kept, dropped = [], 0
        for line in path.read_bytes().splitlines():
            step = _step_of(line)
            if step is None:
                dropped += 1
            elif step <= state.global_step:
                kept.append(line.decode() + "\n")
        if dropped:
            count = "1 line" if dropped == 1 else f"{dropped:,} lines"
            logger.warning("%s: %s left out that a kill cut short or that names no step", path, count)
        # What the end of a run logs stands at its last step, too, but the checkpoint does not know of it.
        if state.global_step:
            kept = kept[: len(state.log_history)]
        with atomic_write(path) as stream:
            stream.writelines(kept)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write the line."""
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **logs}) + "\n")


def collapse(logs: dict[str, float]) -> str | None:
    """How the embeddings of a line of logs are collapsed, for people; None where they are not, or it can't be told."""
    # Comparisons are such that NaN is no sign of anything.
    similarity = logs.get("shuffled_similarity", 0.0)
    if similarity >= COLLAPSE_SIMILARITY:
        return f"unrelated pairs have cosine {similarity:.3f}: the embeddings are collapsing to one direction"
    if logs.get("rank_pairs", 0.0) < COLLAPSE_PAIRS:
        return None
    for side in ("source", "target"):
        rank = logs.get(f"{side}_rank", math.inf)
        if rank <= COLLAPSE_RANK:
            pairs = int(logs["rank_pairs"])
            return f"{pairs} {side} embeddings have effective rank {rank:.2f}: they are collapsing to one line"
    return None


class CollapseCallback(TrainerCallback):
    """Warns once in a run, however often it is resumed, when embeddings have become the same for all records."""

    def __init__(self) -> None:
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at what a resumed run has logged: it was warned of then."""
        self._warned = any(collapse(line) for line in state.log_history)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Look at the similarity of shuffled pairs, and at the ranks."""
        if self._warned or not state.is_world_process_zero:
            return
        found = collapse(logs or {})
        if found is not None:
            self._warned = True
            logger.warning("step %d: %s; %s", state.global_step, found, REMEDIES)


class EpochCallback(TrainerCallback):
    """Tells the sampler which epoch it is, however many wrappers a resume or several processes put around it."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Find the sampler and set its epoch."""
        inner = train_dataloader
        while inner is not None:
            if hasattr(inner, "set_epoch") and hasattr(inner, "epoch"):
                inner.set_epoch(int(state.epoch))
                return
            sampler = getattr(inner, "batch_sampler", None)
            inner = sampler if sampler is not None else getattr(inner, "sampler", None)
