"""Make tables, targets and pictures of a results file of ``bench.py``, and put them into ``docs/performance.md``.

Only what stands between the two markers of the page is rewritten. Results of ``scaling.py`` are drawn, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench_plots import draw_arms, draw_curves
from bench_table import markdown
from bench_targets import find_targets, targets_table

from stepjepa.errors import UserError
from stepjepa.files import existing_file

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
BEGIN = "<!-- made by benchmarks/report.py from {file}: do not edit -->"
END = "<!-- end of what benchmarks/report.py made -->"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", nargs="+", help="results files of bench.py (one) and scaling.py")
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
    if "suites" not in results and "curves" not in results:
        raise UserError("neither of bench.py nor of scaling.py", path=found)
    return results


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
    return PLOTS / f"bench-{suite}.png"


def replace_between(page: str, text: str) -> str:
    """A page with a new text between its markers.

    Raises:
        UserError: the markers are missing.
    """
    start = page.find(BEGIN.partition("{file}")[0])
    end = page.find(END)
    if not 0 <= start < end:
        raise UserError(f"has no two markers; put '{BEGIN.format(file='-')}' and '{END}' into it", path=PAGE)
    return page[:start] + text + page[end + len(END) :]


def main() -> int:
    """Write the page; an error that the user can put right takes one line."""
    args = parser().parse_args()
    try:
        for path in args.results:
            results = read_results(path)
            if "curves" in results:
                if not args.print:
                    draw_curves(results, PLOTS / "scaling.png")
                    print(f"drawn: {os.path.relpath(PLOTS / 'scaling.png')}")
                continue
            if not args.print:
                for old in PLOTS.glob(picture("*").name):
                    old.unlink()
                for suite, measured in results["suites"].items():
                    draw_arms(suite, measured["summary"], picture(suite))
            text = generated(results, Path(path).name)
            if args.print:
                print(text)
            else:
                PAGE.write_text(replace_between(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
                print(f"rewritten: {os.path.relpath(PAGE)}, {os.path.relpath(PLOTS)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
