"""The tables of docs/performance.md, from the newest results of every suite.

python benchmarks/tables.py            # write it
python benchmarks/tables.py --check    # says that all figures agree; exit 1 where one does not
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
NAMES = {"synth": "synth", "spider": "spider", "gsm8k": "gsm8k", "smollm2": "SmolLM2-135M, synth"}
AIMS = {
    "regular": (2.0, 1.8, 1.64, 2.1),
    "branched": (1.4, 1.2, 0.87, 1.6),
    "separate": (1.3, 1.05, 0.92, 1.2),
}
BLOCK = r"(?<=<!-- {} -->\n)[\s\S]*?(?=<!-- end -->)"
PICTURES = {
    "answers": "Time and tokens of an example against answers to a question",
    "prefix": "Time and tokens of an example against the tokens of a shared prefix",
}
# The axis of ``growth.py``, what its row says, and the figure with the number that it is for each of.
GROWTH = (
    ("records", "preparing a record; {} records", "prepare s", "records"),
    ("records", "from there to the end of the first step; {} records", "to the first step s", None),
    ("records", "peak memory; {} records", "peak MiB", None),
    ("batch", "time of a step for each record; {} records a step", "step ms", "batch"),
    ("batch", "peak memory; {} records a step", "peak MiB", None),
    ("tokens", "time of a step for each token; records of {} tokens", "step ms", "tokens of a record"),
    ("tokens", "peak memory; records of {} tokens", "peak MiB", None),
)
# Results of a suite with another setting, by the end of their file's name, and what the row says.
SETTINGS = {
    "gsm8k-micro4": "gsm8k, ours in micro-batches of 4, too; one core",
    "smollm2-bf16": "SmolLM2-135M, synth, `bf16` in every arm",
}
POINTS = {"answers": "answers to a question", "prefix": "tokens of a shared prefix"}


def table() -> str:
    """Markdown: a column a suite."""
    suites = {name: newest(name) for name in NAMES}
    rows = [["over TRL's best plain setting", *NAMES.values()], ["---"] * (len(NAMES) + 1)]
    for arm, aims in AIMS.items():
        over_trl = (spread(suite["summary"][arm]["over_trl"]) for suite in suites.values())
        rows.append([arm, *(f"{each}, aim {aim}" for each, aim in zip(over_trl, aims, strict=True))])
    for arm in AIMS:
        over_grouped_trl = (spread(over_grouped(suite, arm)) for suite in suites.values())
        rows.append([f"{arm}, over TRL's batches of the same size grouped by length", *over_grouped_trl])
    for title, key in (("time to the first step", "first_step"), ("preparation of the whole file", "preparation")):
        rows.append([f"{title}, regular", *(spread(suite[f"{key}_over_trl"]) for suite in suites.values())])
    for arm in AIMS:
        rows.append([f"peak memory, {arm}", *(peak(suite, arm) for suite in suites.values())])
    for arm in AIMS:
        peaks_over_grouped = (peak(suite, arm, "trl grouped") for suite in suites.values())
        rows.append([f"peak memory, {arm}, over TRL's batches of the same size", *peaks_over_grouped])
    rows.append(["TRL's fastest setting", *(fastest(suite) for suite in suites.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def pictures_and_table_of_points() -> str:
    """Markdown: the pictures of the suites that are measured at several points, and a row for each point.

    Empty for suites that have no results yet.
    """
    pictures = [f"![{text}](plots/performance-{suite}.png)\n" for suite, text in PICTURES.items() if newest_file(suite)]
    return "\n".join(["", *pictures, table_of_points()]) if pictures else ""


def table_of_points() -> str:
    """Markdown: a row for each point of the suites that are measured at several, with the figures of all arms."""
    arms = ", ".join(AIMS)
    rows = [[f"{arms}, over TRL's best plain setting", "speed", "tokens", "peak memory"], ["---"] * 4]
    for suite, unit in POINTS.items():
        for point, measured in points(suite).items():
            summary = measured["summary"]
            plain = summary[fastest(measured)]["tokens"]
            figures = (
                [f"{summary[arm]['over_trl']['median']:.2f}" for arm in AIMS],
                [f"{summary[arm]['tokens'] / plain:.2f}" for arm in AIMS],
                [peak(measured, arm) for arm in AIMS],
            )
            name = unit.replace("answers", "answer") if point == 1 else unit
            rows.append([f"{point:,} {name}", *(", ".join(each) for each in figures)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def settings_table() -> str:
    """Markdown: a row for each suite that was measured with another setting; empty without results."""
    rows = []
    for name, title in SETTINGS.items():
        if (path := newest_file(name)) is None:
            continue
        (measured,) = json.loads(path.read_text(encoding="utf-8"))["suites"].values()
        speeds = [spread(measured["summary"][arm]["over_trl"]) for arm in AIMS]
        rows.append([title, *speeds, ", ".join(peak(measured, arm) for arm in AIMS) if "peak_mib" in measured else "–"])
    columns = "over TRL's best plain setting", *AIMS, "peak memory of the three"
    return "\n".join(markdown(columns, rows)) + "\n" if rows else ""


def growth() -> dict[str, list[dict[str, Any]]] | None:
    """The newest results of ``growth.py``: of each axis its points; None if there are none."""
    file = newest_file("growth")
    results: dict[str, list[dict[str, Any]]] | None = None if file is None else json.loads(file.read_text("utf-8"))
    return results


def growth_table() -> str:
    """Markdown: how the time of a record or token, and memory, grow along each axis, over its first point."""
    results = growth()
    if results is None:
        return ""
    lines = []
    for axis, what, key, per in GROWTH:
        cells = []
        for arm in dict.fromkeys(row["arm"] for row in results[axis]):
            figures = [row[key] / (row[per] if per else 1) for row in results[axis] if row["arm"] == arm]
            cells.append(", ".join(f"{figure / figures[0]:.2f}" for figure in figures))
        named = dict.fromkeys(round(row["tokens of a record" if axis == "tokens" else axis]) for row in results[axis])
        lines.append((what.format(", ".join(f"{point:,}" for point in named)), *cells))
    return "\n".join(markdown(("over the first of them", "plain", "branched"), lines)) + "\n"


def precision_table() -> str:
    """Markdown: float32 against autocast to bfloat16 on a CPU, from the newest results of ``precision.py``."""
    file = newest_file("precision")
    if file is None:
        return ""
    measured = json.loads(file.read_text("utf-8"))
    rows = []
    for one in measured:
        name = f"`{one['model']}`, {one['arm']}"
        if "median" in one:
            rows.append((name, f"float32 takes {spread(one)} times as long"))
            continue
        ends = f"{one['float32']:.3f} in float32, {one['bfloat16']:.3f} in bfloat16"
        apart = f"at most {one['most_apart']:.0%} apart in a step"
        rows.append((f"{name}, {one['steps']} steps", f"LM loss, mean of the last ten: {ends}; {apart}"))
    return "\n".join(markdown(("model, arm", "float32 against bfloat16"), rows)) + "\n"


def embedding_table() -> str:
    """Markdown: embedding texts against sentence-transformers, from the newest results of each suite."""
    suites: dict[str, Any] = {}
    for file in files("embeddings"):
        suites |= json.loads(file.read_text("utf-8"))["suites"]
    rows = []
    for name, measured in suites.items():
        tokens = f"{measured['tokens_of_a_text']:.0f}"
        if measured["tokens_of_the_system_prompt"]:
            tokens += f" behind {measured['tokens_of_the_system_prompt']}"
        ratio = f"{spread(measured['over_sentence_transformers'])}, aim {measured['aim']}"
        rows.append((name, f"{measured['texts']:,}", tokens, ratio, f"{measured['largest_difference']:.0e}"))
    columns = "texts", "number", "tokens of one", "texts a second over sentence-transformers'", "largest difference"
    return "\n".join(markdown(columns, rows)) + "\n" if rows else ""


def gpu_tables() -> str:
    """Markdown: speed of every arm on a GPU, a large model, attention alone and the LM head alone.

    Each part is that of the newest file that has it: a time limit cuts off parts.
    """
    results: dict[str, Any] = {}
    for file in sorted((HERE / "results").glob("*-gpu-*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        results |= {name: (part, found["about"]) for name, part in found["parts"].items() if part.get("complete")}
    makers: dict[str, Callable[[dict[str, Any]], Iterable[list[str]]]] = {
        "speed": lambda part: [speed_on_gpu(part)],
        "large": lambda part: [large_on_gpu(part)],
        "micro": pieces_on_gpu,
    }
    tables: list[str] = []
    for name, make in makers.items():
        part, about = results[name]
        where = f"{part['card']}, torch {about['torch']}, {about['cpus']} CPU cores."
        tables += [*([where] if where not in tables else []), *("\n".join(lines) for lines in make(part))]
    return "\n\n".join(tables) + "\n"


def large_on_gpu(large: dict[str, Any]) -> list[str]:
    """Time and memory of a large model with LoRA, as lines of a table."""
    columns = (
        "8B shape, LoRA, 8 records of 1,024 tokens",
        "ms a step",
        "peak GiB",
        "peak by `--dry_run`, without kernels",
    )
    arms = {name: each for name, each in large.items() if isinstance(each, dict) and each.get("records") == 8}
    rows = [(name, f"{each['median']:,.0f}", each["peak GiB"], each["dry run, sum"]) for name, each in arms.items()]
    return markdown(columns, rows)


def pieces_on_gpu(micro: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of two tables: attention alone and the LM head alone."""
    kinds = "segments", "flex", "dense mask"
    columns = "attention of one row, 32 heads of 64, both passes", *(f"{kind}, ms" for kind in kinds)
    points = {name.removeprefix("attention, "): each for name, each in micro.items() if name.startswith("attention")}
    yield markdown(columns, [(name, *(piece(each, kind, "ms") for kind in kinds)) for name, each in points.items()])
    shapes = micro["lm head of 8192 states"]
    sizes = [size for size in shapes["0.5B"] if re.match(r"chunk \d|plain", size)]
    rows = [
        (size, *(f"{piece(each, size, 'ms')}, {piece(each, size, 'peak GiB')} GiB" for each in shapes.values()))
        for size in sizes
    ]
    yield markdown(("LM head of 8,192 states: ms, peak GiB", *shapes), rows)


def speed_on_gpu(speed: dict[str, Any]) -> list[str]:
    """Speed and memory of every arm, as lines of a table."""
    arms = {name: each for name, each in speed.items() if isinstance(each, dict) and "examples/s" in each}
    rows = []
    for name, each in arms.items():
        point, _, arm = name.rpartition(": ")
        over = each["examples/s"] / arms[f"{point}: trl grouped"]["examples/s"]
        rows.append((point, arm, f"{each['median']:.0f}", f"{over:.2f}", f"{each['peak GiB']:.1f}"))
    return markdown(
        ("records", "arm", "ms a step", "examples a second over TRL's, grouped by length", "peak GiB"), rows
    )


def piece(measured: dict[str, Any], name: str, figure: str) -> str:
    """A figure of a piece; a dash where it was not measured."""
    value = measured.get(name, {}).get(figure)
    return "-" if value is None else f"{value:.3g}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(map(str, row))} |" for row in [columns, ["---"] * len(columns), *rows]]


def newest_file(suite: str) -> Path | None:
    """The newest results file of a suite; None if there is none."""
    return next(reversed(files(suite)), None)


def files(suite: str) -> list[Path]:
    """The results files of a suite, the newest last."""
    those = [path for path in (HERE / "results").glob("*.json") if re.search(rf"-{suite}(-\d+)?$", path.stem)]
    return sorted(those, key=lambda path: (path.stem[:10], len(path.stem), path.stem))


def newest(suite: str) -> dict[str, Any]:
    """The results of a suite in its newest file."""
    path = newest_file(suite)
    if path is None:
        sys.exit(f"error: there are no results of the suite {suite}; run bench.py --suite {suite}")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["suites"][suite]
    return results


def points(suite: str) -> dict[int, dict[str, Any]]:
    """The figures of a suite at each point, in ascending order."""
    measured = newest(suite)["points"] if newest_file(suite) else {}
    return {int(point): figures for point, figures in sorted(measured.items(), key=lambda each: int(each[0]))}


def spread(figure: dict[str, float]) -> str:
    """Median [lowest, highest]."""
    return f"{figure['median']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def over_grouped(suite: dict[str, Any], arm: str) -> dict[str, float]:
    """Speed over TRL's with batches of the same number of records, grouped by length; ratios within a round."""
    ratios = sorted(
        one[arm]["examples_per_second"] / one["trl grouped"]["examples_per_second"] for one in suite["rounds"]
    )
    return {"median": ratios[len(ratios) // 2], "low": ratios[0], "high": ratios[-1]}


def peak(suite: dict[str, Any], arm: str, setting: str | None = None) -> str:
    """Peak memory over that of a setting of TRL, by default its fastest one."""
    peaks = suite.get("peak_mib")
    return f"{peaks[arm] / peaks[setting or fastest(suite)]:.2f}" if peaks else "not measured"


def fastest(suite: dict[str, Any]) -> str:
    """TRL's setting with the highest median speed."""
    names = [name for name in suite["summary"] if name.startswith("trl")]
    return max(names, key=lambda name: suite["summary"][name]["speed"]["median"])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    made = text
    tables = {
        "tables.py": table,
        "tables.py, points": pictures_and_table_of_points,
        "tables.py, settings": settings_table,
        "tables.py, growth": growth_table,
        "tables.py, precision": precision_table,
        "tables.py, embeddings": embedding_table,
        "tables.py, gpu": gpu_tables,
    }
    for name, make in tables.items():
        block = re.search(BLOCK.format(name), made)
        if block is None:
            sys.exit(f"error: {PAGE} has no block '<!-- {name} -->'")
        made = made[: block.start()] + make() + made[block.end() :]
    if "--check" in sys.argv[1:]:
        if made != text:
            sys.exit(f"{PAGE.name}: the table is not that of benchmarks/results")
        print(f"all figures agree: {PAGE.name}")
        sys.exit()
    PAGE.write_text(made, encoding="utf-8")
