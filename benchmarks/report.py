"""Make tables, targets and pictures of results, and put them into ``docs/performance.md``.

    python benchmarks/report.py FILE ...    # of bench.py, scaling.py, gpu.py and profile_memory.py, seen from the file

Only what stands between the two markers of a benchmark is rewritten.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench_gpu_table import markdown as gpu_markdown
from bench_memory_table import markdown as memory_markdown
from bench_plots import draw_arms, draw_curves, draw_lengths
from bench_scaling_table import markdown as scaling_markdown
from bench_table import markdown
from bench_targets import find_targets, targets_table

from stepjepa.errors import UserError
from stepjepa.files import existing_file

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- made by benchmarks/report.py from {file}: do not edit -->"
END = "<!-- end of what benchmarks/report.py made -->"
# Key of a results file that only this benchmark has -> its name in the markers, where bench.py has none.
KINDS = {"suites": "", "curves": "scaling: ", "ceiling": "gpu: ", "memory": "memory: "}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", nargs="+", help="results files, one of each benchmark at most")
    options.add_argument("--page", type=Path, default=PAGE, help="page to rewrite (default: docs/performance.md)")
    options.add_argument("--print", action="store_true", help="write to standard output and leave the page alone")
    return options


def read_results(path: str | Path) -> dict[str, Any]:
    """A results file.

    Raises:
        UserError: there is none, or it is none.
    """
    found = existing_file(str(path), "results file")
    try:
        results: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON: {error}", path=found) from None
    if not any(key in results for key in KINDS):
        raise UserError("not of bench.py, scaling.py, gpu.py or profile_memory.py", path=found)
    return results


def markers(results: dict[str, Any]) -> tuple[str, str]:
    """The lines before and behind what is made of results; the first one names the file as ``{file}``."""
    kind = next(name for key, name in KINDS.items() if key in results)
    return BEGIN.replace("made by", f"{kind}made by"), END.replace("end of", f"{kind}end of")


def text_of(results: dict[str, Any], file: str) -> str:
    """What stands between the markers of a benchmark, markers included.

    Args:
        results: of any benchmark.
        file: name of the results file, in ``benchmarks/results``.
    """
    if "suites" in results:
        return generated(results, file)
    begin, end = markers(results)
    head = f"Results: [{file}](../benchmarks/results/{file}) ({results['date']}, "
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in ("torch", "transformers"))
    if "curves" in results:
        settings = results["settings"]
        head += f"{results['machine']}, {settings['preset']}, {settings['length']} tokens a record and "
        head += f"{settings['batch_size']} records a process where that is not the curve; {versions})."
        body = [scaling_markdown(results), "![time and memory against every size](plots/scaling.png)"]
    elif "memory" in results:
        settings = results["settings"]
        head += f"{settings['steps']} steps of {settings['batch_size']} records, {settings['threads']} CPU threads; "
        head += f"{versions}). In hundredths of the peak of TRL's process:"
        body = [memory_markdown(results)]
    else:
        body = [gpu_markdown(results), "![tokens per second against length](plots/gpu.png)"]
        head += f"{versions})."
    return "\n\n".join([begin.format(file=file), head, *body, end])


def draw(results: dict[str, Any], plots: Path) -> None:
    """Make the pictures of a benchmark; of memory there are none.

    Args:
        results: of any benchmark.
        plots: folder of pictures.
    """
    if "curves" in results:
        draw_curves(results, plots / "scaling.png")
    elif "ceiling" in results:
        draw_lengths(results, plots / "gpu.png")
    elif "suites" in results:
        for old in plots.glob(picture("*").name):
            old.unlink()
        for suite, measured in results["suites"].items():
            draw_arms(suite, measured["summary"], plots / picture(suite).name)


def generated(results: dict[str, Any], file: str) -> str:
    """What stands between the markers, markers included.

    Args:
        results: of ``bench.py``.
        file: name of the results file, in ``benchmarks/results``.
    """
    settings, versions = results["settings"], results["versions"]
    said = f"{results['date']}, {settings['threads']} CPU threads, float32, {settings['batch_size']} records a step, "
    said += f"{settings['rounds']} rounds; medians, with the lowest and the highest round in brackets; "
    said += ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl"))
    parts = [BEGIN.format(file=file), f"Results: [{file}](../benchmarks/results/{file}) ({said})."]
    targets = [
        target
        for suite, measured in results["suites"].items()
        for target in find_targets(measured, suite, settings["batch_size"])
    ]
    aimed = [target.reached for target in targets if target.reached is not None]
    parts += ["### Targets", f"{sum(aimed)} of {len(aimed)} ratios are where they should be, by their median."]
    parts.append(targets_table(targets))
    for suite, measured in results["suites"].items():
        parts += [f"### {_title(suite, measured['data'], settings)}", markdown(measured["summary"])]
        shown = f"plots/{picture(suite).name}"
        parts.append(f"![examples per second and peak memory of every arm of {suite}]({shown})")
    return "\n\n".join([*parts, END])


def _title(suite: str, data: dict[str, Any], settings: dict[str, Any]) -> str:
    model = data.get("model") or settings["model"]
    vocabulary = f", vocabulary of {data['vocabulary']:,}" if data.get("vocabulary") else ""
    size = f"{data['parameters'] / 1e6:.1f} M parameters{vocabulary}"
    return f"{suite}: {data['file']}, {data['tokens_per_example']:.0f} tokens a record, {model} ({size})"


def picture(suite: str) -> Path:
    """Where the picture of a suite is."""
    return PAGE.parent / "plots" / f"bench-{suite}.png"


def replace_between(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with a new text between two markers.

    Args:
        page: the whole page.
        text: with the markers.
        begin: of :func:`markers`.
        end: likewise.

    Raises:
        UserError: the markers are missing.
    """
    start, last = page.find(begin.partition("{file}")[0]), page.find(end)
    if not 0 <= start < last:
        raise UserError(f"the page has no two markers; put '{begin.format(file='-')}' and '{end}' into it")
    return page[:start] + text + page[last + len(end) :]


def main() -> int:
    """Write the page; an error that the user can put right takes one line."""
    args = parser().parse_args()
    try:
        for path in args.results:
            results = read_results(path)
            text = text_of(results, Path(path).name)
            if args.print:
                print(text)
                continue
            page = existing_file(str(args.page), "page")
            whole = replace_between(page.read_text(encoding="utf-8"), text, *markers(results))
            plots = page.parent / "plots"
            draw(results, plots)
            page.write_text(whole, encoding="utf-8")
            print(f"rewritten: {os.path.relpath(page)}, {os.path.relpath(plots)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
