"""What a run does beside its steps: ``metrics.jsonl``, lines of losses, a warning on collapse, requests to stop."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback, TrainerCallback

from stepjepa.files import atomic_write
from stepjepa.objectives.monitors import REMEDIES, collapse
from stepjepa.objectives.term import TERMS
from stepjepa.run_folder import METRICS_FILE
from stepjepa.signals import OneRequest, Stopped

logger = logging.getLogger(__name__)


class MetricsCallback(TrainerCallback):
    """Appends every line of logs to ``metrics.jsonl`` in the run folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a resumed run, drop what was logged after the checkpoint: those steps are run again."""
        path = Path(args.output_dir) / METRICS_FILE
        if not state.is_world_process_zero or not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            # A kill may have cut the last line short.
            with suppress(ValueError):
                if json.loads(line)["step"] <= state.global_step:
                    kept.append(line)
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


class CollapseCallback(TrainerCallback):
    """Warns once in a run, however often it is resumed, when embeddings have become the same for all records."""

    def __init__(self) -> None:
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at what a resumed run has logged: it was warned of then."""
        self._warned = any(collapse(line) for line in state.log_history)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Look at the similarity of shuffled pairs, and at the ranks."""
        found = collapse(logs or {})
        if found is not None and not self._warned and state.is_world_process_zero:
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


class StopCallback(TrainerCallback):
    """Has a checkpoint saved at the end of the step in which a signal came, and ends training when it is there.

    All processes do so at the same step, whichever of them was sent the signal. A step that ends an epoch is ended with
    what the epoch's end brings, evaluation among it, and an evaluation is ended too, so that nothing is missing from a
    run that is resumed later. ``Trainer.train`` raises ``Stopped`` then, after the checkpoint was written.
    """

    def __init__(self, request: OneRequest, processes: int = 1, device: torch.device | None = None) -> None:
        self._request, self._processes, self._device = request, processes, device
        self._number = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask all processes for a request, unless the epoch ends here as well."""
        if not float(state.epoch).is_integer():
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask all processes for a request."""
        if not self._number:
            self._number = self._request.first
            if self._processes > 1:
                numbers = torch.tensor(self._number, device=self._device)
                torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
                self._number = int(numbers.item())
        control.should_save |= bool(self._number)

    # An evaluation may take long.
    on_evaluate = on_epoch_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave."""
        if self._number:
            raise Stopped(self._number)


def console_line(logs: dict[str, float]) -> str | None:
    """One line for people out of a line of logs; None for logs that are not losses."""
    prefix = "eval_" if "eval_lm_loss" in logs else ""
    if f"{prefix}lm_loss" not in logs:
        return None
    parts = [f"{term.words}: {logs[prefix + name]:.4f}" for name, term in TERMS.items() if prefix + name in logs]
    parts.append(f"Total: {logs[f'{prefix}loss']:.4f}" if f"{prefix}loss" in logs else "all steps skipped")
    if f"{prefix}matched_similarity" in logs:
        shuffled = logs.get(f"{prefix}shuffled_similarity")
        other = "–" if shuffled is None else f"{shuffled:.3f}"
        parts.append(f"cos matched/shuffled: {logs[f'{prefix}matched_similarity']:.3f}/{other}")
    if f"{prefix}source_rank" in logs:
        parts.append(f"rank: {logs[f'{prefix}source_rank']:.1f}/{logs[f'{prefix}target_rank']:.1f}")
    answers = {name.removeprefix("eval_answer_"): value for name, value in logs.items() if "eval_answer_" in name}
    parts += [f"{name}: {value:.3f}" for name, value in answers.items()]
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    if "pairs_per_second" in logs:
        parts.append(f"{logs['pairs_per_second']:,.1f} pairs/s")
    return ("eval  " if prefix else "") + ", ".join(parts)


class ConsoleCallback(TrainerCallback):
    """Prints a line of losses for every line of logs, above the Trainer's own progress bar where there is one."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Print the line."""
        line = console_line(logs or {})
        if line is not None and state.is_world_process_zero:
            tqdm.write(f"step {state.global_step}/{state.max_steps}  {line}", file=sys.stdout)
            sys.stdout.flush()


class BarCallback(ProgressCallback):
    """The Trainer's progress bar without its own lines of logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Nothing: see ``ConsoleCallback``."""
