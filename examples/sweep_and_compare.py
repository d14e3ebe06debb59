"""A sweep over arms and seeds, and its comparison: examples/sweep.yaml on generated word problems. Offline, on a CPU.

One run shows nothing. Here regular training and Step-JEPA with two weights are each trained and evaluated with two
seeds.

What you should see: six trials, one after the other; a table of the arms with the spread over seeds, the difference to
the baseline, and how sure it is; a page of all of it that opens by double click. What it does not show: a difference.
Two seeds allow a test of next to no power, and models that have seen 2,000 problems once solve 2 to 4 % in every arm;
real comparisons take models that have learnt their task, and five seeds or more.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from shown import arguments, command

GRID = Path(__file__).parent / "sweep.yaml"


def make_grid(folder: Path, *, tiny: bool = False) -> Path:
    """The grid of examples/sweep.yaml with the files of this folder; writes and returns its path."""
    grid = yaml.safe_load(GRID.read_text(encoding="utf-8"))
    grid["train"]["train_file"] = f"{folder}/data/train.jsonl"
    grid["evaluate"]["test_file"] = f"{folder}/data/test.jsonl"
    if tiny:
        grid["train"] |= {"max_steps": 2, "batch_size": 4, "logging_steps": 1}
        grid["evaluate"]["max_new_tokens"] = 8
        grid["arms"]["step-jepa"]["lbd"] = 0.02
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(grid, sort_keys=False), encoding="utf-8")
    return path


def run(folder: Path, *, tiny: bool = False) -> None:
    """Make data, run the grid, compare its arms."""
    sizes = "--train_size 16 --test_size 3" if tiny else "--train_size 2000 --test_size 100"
    command(f"prepare stepmath --output_dir {folder}/data {sizes} --max_steps 2")
    grid = make_grid(folder, tiny=tiny)
    command(f"sweep --config {grid} --output_dir {folder}/sweep")
    runs = " ".join(str(path) for path in sorted((folder / "sweep").glob("*/seed*/")))
    command(f"compare {runs} --plot {folder}/comparison.png")
    command(f"report {folder}/sweep --output_file {folder}/report.html")
    print(f"\nrun folders: {folder}/sweep/*/seed*, picture: {folder}/comparison.png")


if __name__ == "__main__":
    args = arguments(__doc__, "sweep-and-compare")
    run(args.output_dir, tiny=args.tiny)
