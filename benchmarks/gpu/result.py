"""What a part of the check measured, written after every measurement; times, memory and compiled graphs."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# FLOP/s, dense bfloat16, from the data sheets.
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


class Result:
    """What a part has measured so far; every change is written to its file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.began, self.seconds = path, time.perf_counter(), seconds
        self.values: dict[str, Any] = {}

    def put(self, name: str, value: Any, *, say: bool = True) -> None:
        self.values[name] = value
        self.values["seconds"] = round(time.perf_counter() - self.began, 1)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1, default=str), encoding="utf-8")
        part.replace(self.path)
        if say:
            print(f"  [{self.path.stem} {self.values['seconds']:6.1f}s] {name}: {short(value)}", flush=True)

    def left(self) -> float:
        """Seconds of the part's time that are left."""
        return self.seconds - (time.perf_counter() - self.began)

    @contextlib.contextmanager
    def trying(self, name: str, needs: float = 0.0) -> Iterator[bool]:
        """Note an error under this name and go on. Skip the measurement if too little time is left."""
        if self.left() < needs:
            self.put(name, {"skipped": f"{self.left():.0f} s left, {needs:.0f} needed"})
            yield False
            return
        try:
            yield True
        except Skip as skip:
            self.put(name, {"skipped": str(skip)})
        except Exception as caught:  # of any kind, so that the next measurement still runs
            error: BaseException | None = caught
            lines = traceback.format_exc().strip().splitlines()
            self.put(name, {"error": f"{type(error).__name__}: {error}"[:1500], "trace": lines[-14:]})
            while error is not None:  # the frames hold tensors
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
        finally:
            free()


class Skip(Exception):
    """The measurement does not exist on this device."""


def short(value: Any, size: int = 420) -> str:
    """As JSON, cut off."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= size else text[:size] + " ..."


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits."""
    return float(f"{value:.{digits}g}")


def free() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def wait() -> None:
    """Until the device has done all that it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_memory(reset: bool = False) -> float | None:
    """Peak of the allocated memory in GiB since the last reset."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    peak = torch.cuda.max_memory_allocated() / 2**30
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


def timed(call: Callable[[], object], least: int = 3, seconds: float = 0.35) -> float:
    """Median time of a call in milliseconds, after two warm-up calls."""
    call()
    call()
    wait()
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds * 1e3 and len(times) < 50):
        if torch.cuda.is_available():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return rounded(statistics.median(times))


def compiled() -> int:
    """Number of graphs that torch has compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def importable(name: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(name) is not None


def peak_flops() -> float | None:
    """FLOP/s of the device by its data sheet; None if it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((value for key, value in PEAK.items() if key in name), None)
