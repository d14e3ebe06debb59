"""Record the embeddings of a pretrained model before and after training, from an analysis of ``stepjepa analyze``.

    stepjepa analyze --model_path runs/experiment/smollm2-135m-instruct runs/experiment/smollm2/regular-prompt/seed23 \\
        runs/experiment/smollm2/branched-cosine-lbd0.5-k1/seed82 runs/experiment/smollm2/branched-infonce-0.2/seed82 \\
        --test_file ../shared/data/llm_jepa/synth_test.jsonl --max_examples 300 \\
        --output_dir runs/experiment/smollm2-views
    python examples/experiment/embeddings.py runs/experiment/smollm2-views
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from stepjepa.base.files import atomic_write, read_json_object, write_json
from stepjepa.inspection.plots import Points, draw_projection

HERE = Path(__file__).resolve().parent
KEPT = HERE / "embeddings.json"
PICTURE = HERE.parents[1] / "docs" / "plots" / "results-embeddings.png"
NUMBERS = ("pairs", "source_rank", "target_rank", "retrieval_top1")


def main(argv: list[str] | None = None) -> int:
    """Keep an analysis, whose first model is the one before training; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --output_dir of stepjepa analyze")
    folder = parser.parse_args(argv).folder
    models = read_json_object(folder / "analysis.json", "analysis", "run stepjepa analyze")["models"]
    names = ["before", *(Path(model["model_path"]).parent.name for model in models[1:])]
    if len(set(names)) < len(names):
        parser.error(f"expected one seed of each arm, got {', '.join(names)}: leave the others out of the analysis")
    # Those after training are in the figures of each run.
    before = models[0]["numbers"]
    similarity = {f"{kind}_similarity": before[kind]["mean"] for kind in ("matched", "shuffled")}
    figures = {each: before[each] for each in NUMBERS} | similarity
    points = {}
    with np.load(folder / "embeddings.npz") as arrays:
        for place, name in enumerate(names):
            views = [arrays[f"{place}/{view}"] for view in ("source", "target")]
            is_target = np.repeat([False, True], [len(view) for view in views])
            labels = tuple(f"Enc({'code' if target else 'text'})" for target in is_target)
            points[name] = Points(np.concatenate(views), is_target, labels)
    write_json(KEPT, figures)
    with atomic_write(PICTURE, "wb") as stream:
        figure = draw_projection(points, "in_n_out", "SmolLM2-135M, test records of synth", 0)
        figure.savefig(stream, format="png", dpi=80)
    print(f"written: {KEPT}, {PICTURE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
