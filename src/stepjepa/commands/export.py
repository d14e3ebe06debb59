"""``stepjepa export``: a trained run as one plain model folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepjepa.arguments import add_switch
from stepjepa.config import DTYPES

SUMMARY = "merge an adapter into its base, or copy a trained model, as a plain model folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of export."""
    group = parser.add_argument_group("export")
    group.add_argument("--model_path", required=True, metavar="DIR", help="run or checkpoint folder")
    group.add_argument("--output_dir", required=True, metavar="DIR", help="folder for the model; empty or new")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights (auto)")
    add_switch(group, "--trust_remote_code", help="run code that comes with the model (off)")


def run(args: argparse.Namespace) -> int:
    """Load, merge, save."""
    from stepjepa.models.loading import load_for_inference
    from stepjepa.run_folder import open_run_folder, run_of, save_new, write_run

    folder, _ = open_run_folder(args.output_dir, None)
    run = run_of(args.model_path)
    model, tokenizer = load_for_inference(
        args.model_path, dtype=args.dtype, device="cpu", trust_remote_code=args.trust_remote_code
    )

    def save(part: str) -> None:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if run is not None:
            # How the model was trained is how it wants to be asked.
            write_run(Path(part), {**run, "exported_from": str(args.model_path)})

    save_new(folder, save)
    print(f"exported to {folder}: load it with AutoModelForCausalLM.from_pretrained")
    return 0
