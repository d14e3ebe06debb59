"""The measurements of training: the columns of a line of logs."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import Accelerator

from stepjepa.batch.micro_batch import Batch
from stepjepa.objectives.monitors import RUNNING_SUMS, MetricWindow, ratio_column
from stepjepa.objectives.objective import Losses, Objective
from stepjepa.training.interface import MeterState

Total = Callable[[Sequence[float]], list[float]]
"""Function from the numbers of this process to their sums over all processes."""


def sums_over_processes(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Return the sum of each number over all processes, of which every one must call this."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    # Sums need more than the single precision that mps has.
    device = torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device
    sums: list[float] = accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=device), "sum").tolist()
    return sums


class Meter:
    """Measures training between two lines of logs: the terms of an ``Objective``, similarity, ranks, speed."""

    def __init__(self, objective: Objective, total: Total, processes: int) -> None:
        self._objective, self._total, self._processes = objective, total, processes
        self._window = MetricWindow()
        self.num_tokens = 0.0  # computed so far, over all processes, without padding
        self.start()

    def start(self) -> None:
        """Begin a log line: its sums are 0, and its time starts now."""
        self._window.reset()
        self._start = time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Leave ``seconds``, of an evaluation, out of the time of the log line."""
        self._start += seconds

    def state(self) -> MeterState:
        """Return the measurements since the last line, for a checkpoint; see :meth:`restore`."""
        seconds = time.perf_counter() - self._start
        return {"window": self._window.state(), "num_tokens": self.num_tokens, "seconds": seconds}

    def restore(self, state: MeterState, device: torch.device) -> None:
        """Continue the open line of logs from a :meth:`state`."""
        self._window.restore(state["window"], device)
        self.num_tokens, self._start = state["num_tokens"], time.perf_counter() - state["seconds"]

    def begin_step(self, counts: Mapping[str, float]) -> None:
        """Count an optimizer step; ``counts`` are its denominators, by term."""
        self._window.add(steps=1, jepa_steps=float(self._has_views(counts)))

    def add(self, batch: Batch, losses: Losses, counts: Mapping[str, float]) -> None:
        """Add the losses and counts of a micro-batch to those of the log line.

        Args:
            batch: the micro-batch.
            losses: of the micro-batch.
            counts: of the whole optimizer step.
        """
        self._window.add(**losses.parts, tokens=batch.num_tokens, records=batch.num_records)
        # A step that loss dropout leaves without views has no pairs to count.
        views = self._has_views(counts)
        self._window.add(
            records_with_views=batch.num_records * views, records_without_pair=batch.num_without_pair * views
        )
        if len(losses.source):
            self._window.add_pairs(losses.source, losses.target)

    def _has_views(self, counts: Mapping[str, float]) -> bool:
        return any(counts[name] > 0 for name in self._objective.of_pairs)

    def pending_tokens(self) -> float:
        """Return the number of tokens computed so far, including those since the last line."""
        (pending,) = self._total(self._window.totals(["tokens"]))
        return self.num_tokens + pending

    def line(self, logs: Mapping[str, float], progress: float) -> dict[str, float]:
        """Return Trainer's line of ``logs`` with the columns of the objective, and begin a new line.

        ``progress``, 0 to 1, gives the weights that have a schedule.
        """
        objective = self._objective
        names = [*objective.names, *RUNNING_SUMS]
        sums = dict(zip(names, self._total(self._window.totals(names)), strict=True))
        seconds = max(time.perf_counter() - self._start, 1e-9)
        steps, jepa_steps = sums["steps"] / self._processes, sums["jepa_steps"] / self._processes
        self.num_tokens += sums["tokens"]
        line = dict(logs)
        for name in objective.names:
            line |= ratio_column(name, sums[name], jepa_steps if name in objective.of_pairs else steps)
        line |= {
            "num_tokens": self.num_tokens,
            "tokens_per_second": sums["tokens"] / seconds,
            "records_per_second": sums["records"] / seconds,
        }
        if objective.of_pairs:
            weights = {term.logged_weight: term.weight_at(progress) for term in objective.terms.values()}
            line |= {
                **{name: weight for name, weight in weights.items() if name is not None},
                **self._window.monitors(sums, processes=self._processes),
                "pairs_per_second": sums["pairs"] / seconds,
                **ratio_column("without_pair_share", sums["records_without_pair"], sums["records_with_views"]),
            }
        self.start()
        return line
