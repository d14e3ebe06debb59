"""Draw the pictures of docs/design.md, with the functions that training itself uses; `make pictures` runs it.

``pictures.json`` beside them keeps what was drawn, so that a test can tell when the code draws something else by now.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from stepjepa.chat.special_tokens import add_predictor_tokens
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import parse_record
from stepjepa.inspection.record import Inspection, inspect_records, visible_matrix
from stepjepa.inspection.record_text import COLOURS
from stepjepa.inspection.tree_picture import write_png
from stepjepa.models.presets import preset_config, train_tokenizer
from stepjepa.tasks.stepmath import generate

FOLDER = Path(__file__).resolve().parents[1] / "assets"

SYSTEM, QUESTION = "Solve.", "Add 2 and 3, twice."
ANSWERS = ("2 + 3 = 5\n\n5 + 5 = 10", "2 * 2 = 4\n\n4 + 6 = 10")

LAYOUTS = {
    "tree": JepaConfig(mode="step-jepa", predictors=2),
    "step-branched": JepaConfig(mode="step-jepa", predictors=2),
    "step-inplace": JepaConfig(mode="step-jepa", layout="inplace", predictors=2),
    "llm-separate": JepaConfig(mode="llm-jepa", predictors=1),
    "llm-branched": JepaConfig(mode="llm-jepa", layout="branched", predictors=1),
}

COLLAPSE = {"cosine": "--jepa_loss_type cosine --lbd 0.5", "infonce": "--jepa_loss_type infonce --lbd 0.1"}
TRAINING = (
    "--model_name preset:tiny --step_jepa --predictors 2 --max_steps 120 --batch_size 8 --grad_accum 1 "
    "--learning_rate 3e-3 --finetune_seed 82 --save_strategy no"
)


def inspections() -> dict[str, Inspection]:
    """One record in every layout, and two with the same question as ``tree``."""
    texts = [message["content"] for record in generate(400, 1) for message in record["messages"]]
    records = []
    for line, answer in enumerate(ANSWERS, start=1):
        turns = {"system": SYSTEM, "user": QUESTION, "assistant": answer}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        records.append(parse_record({"messages": messages}, "two.jsonl", line))
    result = {}
    for name, config in LAYOUTS.items():
        vocabulary = preset_config("preset:tiny").vocab_size
        tokenizer = train_tokenizer([*texts, SYSTEM, QUESTION, *ANSWERS], vocabulary)
        add_predictor_tokens(tokenizer, config.predictors or 0)
        result[name] = inspect_records(records, 0, tokenizer, config, count=2 if name == "tree" else 1)
    return result


def fingerprint(inspection: Inspection) -> str:
    """Hash everything that a picture shows: tokens, branches, visibility, readouts."""
    shown = [[token.text, token.branch, token.position, *token.readouts] for token in inspection.tokens]
    kinds = [branch.kind for branch in inspection.branches]
    mask = np.packbits(visible_matrix(inspection)).tobytes()
    return hashlib.sha256(json.dumps([shown, kinds]).encode() + mask).hexdigest()


def _run(line: str) -> None:
    if main(line.split()) != 0:
        raise SystemExit(f"stepjepa {line} failed")


def held_out_views(folder: Path, flags: str, name: str) -> tuple[Any, Any]:
    """Train one model; its embeddings of held-out views, scaled to length 1."""
    from sklearn.preprocessing import normalize

    from stepjepa.data.sources import read_records
    from stepjepa.evaluation.run import pair_embedder
    from stepjepa.models.loading import load_for_inference

    _run(f"train --train_file {folder}/data/train.jsonl --output_dir {folder}/{name} {TRAINING} {flags}")
    model, tokenizer = load_for_inference(f"{folder}/{name}")
    config = JepaConfig(mode="step-jepa", predictors=2)
    views = pair_embedder(model, tokenizer, config)(read_records(folder / "data" / "test.jsonl"))
    return normalize(views.source), normalize(views.target)


def draw_collapse(path: Path) -> dict[str, dict[str, float]]:
    """Train one model that collapses and one that does not, and draw their views; returns the cosines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=130, layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    said = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _run(f"prepare stepmath --output_dir {folder}/data --train_size 960 --test_size 200 --max_steps 2")
        for axes, (name, flags) in zip(panels, COLLAPSE.items(), strict=True):
            source, target = held_out_views(folder, flags, name)
            cosines = source @ target.T
            matched = float(np.diag(cosines).mean())
            shuffled = float((cosines.sum() - np.trace(cosines)) / (cosines.size - len(cosines)))
            both = np.concatenate([source, target])
            # Not scaled: a model whose views all lie in one place must look like it.
            _, _, directions = np.linalg.svd(both - both.mean(0), full_matrices=False)
            plane = (both - both.mean(0)) @ directions[:2].T
            for values, kind in ((plane[: len(source)], "source"), (plane[len(source) :], "target")):
                axes.scatter(*values.T, s=9, color=COLOURS[kind], label=f"{kind} views", alpha=0.6)
            axes.set_title(
                f"{flags.removeprefix('--jepa_loss_type ').replace('--', '')}\n"
                f"cosine of matched pairs {matched:.3f}, of shuffled pairs {shuffled:.3f}",
                fontsize=10,
            )
            axes.set_aspect("equal")
            said[name] = {"matched": round(matched, 3), "shuffled": round(shuffled, 3)}
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
    return said


def draw() -> int:
    """Draw all pictures."""
    import segments_picture  # beside this file

    all_inspections = inspections()
    for name, inspection in all_inspections.items():
        layout = inspection.config.layout
        write_png(
            inspection,
            FOLDER / f"{name}.png",
            f"{inspection.config.mode}, {layout}, K = {inspection.config.predictors}",
        )
    segments_picture.draw()
    collapse = draw_collapse(FOLDER / "collapse.png")
    shown = {"layouts": {name: fingerprint(each) for name, each in all_inspections.items()}, "collapse": collapse}
    (FOLDER / "pictures.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    print(f"drawn in {FOLDER}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(draw())
