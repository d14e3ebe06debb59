"""The pictures of measured arms and curves, as PNG files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from bench_scaling_table import unit_of_time

from stepjepa.files import atomic_write

OURS, OTHERS, BEFORE = "#0072B2", "#D55E00", "#999999"
MARKS = "os^Dv<>p"


def draw_arms(suite: str, summary: dict[str, dict[str, Any]], path: Path) -> None:
    """Speed with its range over TRL's fastest, and peak memory with what is there before training, one bar per arm.

    Args:
        suite: for the title.
        summary: of ``bench_table.as_json``.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    names = list(summary)
    colours = [OTHERS if name.startswith(("trl", "published")) else OURS for name in names]
    figure = Figure(figsize=(11, 0.32 * len(names) + 1.4), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    spreads = [summary[name]["examples_per_second"] for name in names]
    theirs = [value["median"] for name, value in zip(names, spreads, strict=True) if name.startswith("trl")]
    unit = max(theirs or [value["median"] for value in spreads])
    medians = [value["median"] / unit for value in spreads]
    errors = [[m - v["low"] / unit for m, v in zip(medians, spreads, strict=True)]]
    errors.append([v["high"] / unit - m for m, v in zip(medians, spreads, strict=True)])
    speed.barh(names, medians, xerr=errors, color=colours, ecolor="black", capsize=2)
    speed.set_xlabel("examples per second, " + ("TRL's fastest = 1" if theirs else "the fastest = 1"))
    memory.barh(names, [summary[name]["peak_mib"]["median"] for name in names], color=colours)
    memory.barh(names, [summary[name]["baseline_mib"]["median"] for name in names], color=BEFORE)
    memory.set_xlabel("peak memory, MiB (grey: before training)")
    speed.invert_yaxis()
    figure.suptitle(suite)
    _save(figure, path)


def draw_curves(results: dict[str, Any], path: Path) -> None:
    """Time and memory against each size, one line per arm.

    Args:
        results: of ``scaling.py``.
        path: of the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    curves = results["curves"]
    figure = Figure(figsize=(9, 2.9 * len(curves)), layout="constrained")
    axes = figure.subplots(len(curves), 2, squeeze=False)
    for (time, memory), (name, curve) in zip(axes, curves.items(), strict=True):
        sizes, unit = curve["sizes"], unit_of_time(curve)
        for mark, (arm, points) in zip(MARKS, curve["points"].items(), strict=False):
            there = [(size, point) for size, point in zip(sizes, points, strict=True) if point is not None]
            xs = [size for size, _ in there]
            time.plot(xs, [point["seconds_per_record"] / unit for _, point in there], marker=mark, label=arm)
            memory.plot(xs, [point["peak_mib"] for _, point in there], marker=mark, label=arm)
        for axis, what in ((time, "time a record, first = 1"), (memory, "peak memory, MiB")):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_locator(FixedLocator(sizes))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.set_xlabel(name)
            axis.set_ylabel(what)
        time.set_yscale("log", base=2)
        time.yaxis.set_major_formatter(ScalarFormatter())
        memory.set_ylim(bottom=0)
        time.legend(fontsize="x-small")
    _save(figure, path)


def draw_lengths(results: dict[str, Any], path: Path) -> None:
    """Tokens per second of the records' own text against their length, a picture for each setting, a line per arm.

    Args:
        results: of ``gpu.py``.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    names = ("model", "training", "checkpointing")
    points = [point for point in results["points"] if "none" not in point and not point["forward_only"]]
    settings = list(dict.fromkeys(tuple(point[name] for name in names) for point in points))
    columns = 2
    rows = max(1, -(-len(settings) // columns))
    figure = Figure(figsize=(14, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, setting in zip(axes.flat, settings, strict=False):
        here = [point for point in points if tuple(point[name] for name in names) == setting]
        for mark, arm in zip(itertools.cycle(MARKS), dict.fromkeys(point["arm"] for point in here), strict=False):
            line = sorted((point["length"], point["main_tokens_per_second"]) for point in here if point["arm"] == arm)
            axis.plot(*zip(*line, strict=True), marker=mark, label=arm)
        axis.set(xscale="log", yscale="log", xlabel="tokens of a record", ylabel="main tokens per second")
        axis.set_title(f"{setting[0]}, {setting[1]}, checkpointing {setting[2]}")
    axes[0][0].legend(fontsize="x-small")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=100)
