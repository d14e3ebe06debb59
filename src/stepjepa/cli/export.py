"""``stepjepa export``: a trained model as one plain model folder, on this machine or on a hub."""

import argparse

from stepjepa.cli.commands import Command
from stepjepa.cli.parser import from_args
from stepjepa.running.export import ExportSettings, export

EPILOG = """\
The folder loads with AutoModelForCausalLM.from_pretrained; with --embeddings,
with sentence_transformers.SentenceTransformer. Without --output_dir,
--push_to_hub uploads the folder of --model_path as it is, an adapter as an
adapter. The token is HF_TOKEN, or that of 'hf auth login'."""


def run(args: argparse.Namespace) -> int:
    """Export the model, upload it, or both."""
    export(from_args(ExportSettings, args))
    return 0


EXPORT = Command(run, flags=((ExportSettings, "export"),), epilog=EPILOG)
