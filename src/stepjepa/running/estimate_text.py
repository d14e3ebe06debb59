"""The estimate of a run in words: the rows that a dry run prints, and time and memory on a device."""

from collections.abc import Sequence

from stepjepa.base.counting import counted
from stepjepa.base.terminal import duration, spelled
from stepjepa.running.estimated import Estimate

GIB = 2**30


def on_device(estimated: Estimate, peak: float | None, mfu: float, memory: float | None) -> None:
    """Add ``time`` and ``device`` to the result of ``estimate.dry_run``, and print them.

    Args:
        estimated: changed in place.
        peak: FLOP/s of a device; None if unknown.
        mfu: share of the peak that training reaches.
        memory: bytes of a device; None if unknown.
    """
    flops = estimated["flops"]["step"]
    estimated["time"] = estimated["device"] = None
    if peak is None or flops is None:
        print(spelled("time: not estimated; name a `device`, or its `peak_tflops`"))
    else:
        step = flops / (peak * mfu * estimated["processes"])
        run = step * estimated["steps"]
        estimated["time"] = {"step_seconds": step, "run_seconds": run, "mfu": mfu, "peak": peak}
        print(f"time: {_seconds(step)} a step, {_seconds(run)} in all, at an MFU of {mfu}")
    if memory is not None:
        fits = estimated["memory"]["peak"] <= memory
        estimated["device"] = {"bytes": memory, "fits": fits}
        print(f"device: {memory / GIB:.1f} GiB: the memory above {'fits' if fits else 'does NOT fit'}")


def describe(estimated: Estimate) -> list[tuple[str, str]]:
    """Return the rows of an estimate for ``print_rows``."""
    data, step, memory = estimated["data"], estimated["step"], estimated["memory"]
    checkpoint, largest = estimated["checkpoint"], memory["largest_batch"]
    counts = {name: count for name, count in data.items() if count or name == "records"}
    parts = {"activations": None, "optimizer states": None, **memory["parts"], "sum": memory["peak"]}
    sizes = {name: "not known" if size is None else _bytes(size) for name, size in parts.items()}
    costs = {"step": estimated["flops"]["step"], "regular step": estimated["flops"]["regular_step"]}
    flops = {
        name: "not known" if count is None else f"{_scaled(count, 1000, _SI)}FLOP" for name, count in costs.items()
    }
    tokens = (
        f"{step['tokens']:,.0f} tokens on average, {step['most_tokens']:,} at most, {step['plain_tokens']:,.0f} in "
        f"plain training; {step['text_share']:.1%} of them are text, the rest padding"
    )
    pairs = []
    if (count := estimated["pairs"]) is not None:
        missing = f"; {count['missing']}" if count["missing"] else ""
        text = f"{count['mean']:.3g} a step on average, {count['least']:,} at least, {count['most']:,} at most{missing}"
        pairs.append(("pairs", text))
    settings = {name: estimated[name] for name in ("model", "precision", "encoding")}
    free = f"{_bytes(checkpoint['free'])} free"
    free += "; NOT ENOUGH" if checkpoint["bytes"] * checkpoint["kept"] > checkpoint["free"] else ""
    return [
        *((name, text) for name, text in settings.items() if text is not None),
        ("data", ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())),
        ("step", f"{step['records']}; {tokens}"),
        *pairs,
        ("run", f"{counted(estimated['steps'], 'step')}, {estimated['steps_per_epoch']:,} an epoch"),
        ("memory of a process", ", ".join(f"{name} {size}" for name, size in sizes.items())),
        ("largest batch", ", ".join(f"{name} {count:,}" for name, count in largest.items())),
        ("FLOPs", ", ".join(f"{name} {count}" for name, count in flops.items())),
        ("checkpoints", f"{_bytes(checkpoint['bytes'])} each, {checkpoint['kept']:,} kept, {free}"),
    ]


_SI = ("", "k", "M", "G", "T", "P", "E")


def _scaled(value: float, base: int, prefixes: Sequence[str]) -> str:
    """Format a number with three digits and the prefix of its unit: ``14.3 G``."""
    place = 0
    while value >= 999.5 and place < len(prefixes) - 1:
        value, place = value / base, place + 1
    digits = 0 if value >= 99.95 or (not place and value == int(value)) else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {prefixes[place]}"


def _bytes(size: float) -> str:
    """Format a number of bytes: ``5.91 MiB``."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _seconds(seconds: float) -> str:
    """Format an estimated time, also one far below a second: ``12.3 ms``."""
    return duration(seconds) if seconds >= 1 else f"{_scaled(seconds * 1e6, 1000, ('µ', 'm', ''))}s"
