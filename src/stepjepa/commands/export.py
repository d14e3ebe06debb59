"""``stepjepa export``: write a trained run as one plain model folder, on this machine or on a hub."""

# ruff: noqa: RUF009  # option() makes the field

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa.commands import Command
from stepjepa.config import Dtype
from stepjepa.errors import UserError, visible
from stepjepa.files import read_json_object
from stepjepa.options import option, refuse_without_effect
from stepjepa.run_folder import checksum_fault

EPILOG = """\
The folder loads with AutoModelForCausalLM.from_pretrained. Without --output_dir,
--push_to_hub uploads the folder of --model_path as it is, an adapter as an
adapter. The token is HF_TOKEN, or that of 'hf auth login'."""


@dataclass
class ExportFlags:
    """What is exported, and to where."""

    model_path: str = option(help="run or checkpoint folder", metavar="DIR")
    output_dir: str | None = option(None, "folder for the model; empty or new", metavar="DIR")
    dtype: Dtype = option("auto", "dtype of the weights", only_with="output_dir")
    strip_predictors: bool = option(False, "remove predictor tokens, which only train", only_with="output_dir")
    trust_remote_code: bool = option(False, "run code that comes with the model", only_with="output_dir")
    push_to_hub: str | None = option(None, "upload to this hub repository, created if missing", metavar="ID")
    hub_private_repo: bool = option(False, "make the repository private", only_with="push_to_hub")
    hub_revision: str | None = option(None, "branch (main)", metavar="NAME", only_with="push_to_hub")


def run(args: argparse.Namespace) -> int:
    """Export the model, upload it, or both."""
    if args.push_to_hub is None and args.output_dir is None:
        raise UserError("--output_dir is missing: a folder to export to; or --push_to_hub to upload what is there")
    refuse_without_effect(vars(args), ExportFlags)
    from stepjepa.training import hub

    folder, name = Path(args.output_dir or args.model_path), None
    if args.output_dir is None:
        if not any(folder.glob("*config.json")):
            raise UserError("holds no model; a run that was stopped has its models in checkpoint-N", path=folder)
        hub.refuse_lone_adapter(folder)
    if args.push_to_hub is not None:
        # Fail before the model is loaded if the upload would be refused.
        hub.refuse_offline()
        name = hub.create_repository(args.push_to_hub, private=args.hub_private_repo or None)
    if args.output_dir is None:
        hub.write_card(folder, name=name)
    else:
        _export(args, name)
    if name is not None:
        address = hub.upload(folder, name, message="Exported by stepjepa", revision=args.hub_revision)
        print(f"uploaded: {visible(address)}")
    return 0


def _export(args: argparse.Namespace, name: str | None) -> None:
    """Load the model, merging an adapter into its base, and save it as a plain model folder."""
    if fault := checksum_fault(Path(args.model_path)):
        raise UserError(f"{fault}; export an earlier checkpoint, or train again", path=args.model_path)
    from stepjepa.chat.tokens import all_predictor_ids
    from stepjepa.models.loading import load_for_inference, load_tokenizer
    from stepjepa.models.token_rows import strip_rows, strip_tokenizer
    from stepjepa.run_folder import open_run_folder, run_of, save_new, write_run
    from stepjepa.training.hub import write_card

    folder, _ = open_run_folder(args.output_dir, None)
    run = run_of(args.model_path)
    trust = args.trust_remote_code
    model, tokenizer = load_for_inference(args.model_path, dtype=args.dtype, device="cpu", trust_remote_code=trust)
    count, stripped = len(all_predictor_ids(tokenizer)), None
    if args.strip_predictors:
        stripped = strip_rows(model, tokenizer, _base_rows(args.model_path, run))

    def save(part: str) -> None:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if stripped is not None:
            strip_tokenizer(part, tokenizer, lambda path: load_tokenizer(path, trust_remote_code=trust))
        write_card(Path(part), name=name or folder.absolute().name, run=run or {"model": Path(args.model_path).name})
        if run is not None:
            # Evaluation reads from run.json how the model was trained, and prompts it in the same way.
            more = {} if stripped is None else {"stripped_predictors": count}
            write_run(Path(part), {**run, "exported_from": str(args.model_path), **more})

    save_new(folder, save)
    if stripped is not None:
        rows = f"{stripped} rows of the embedding with them" if stripped else "their rows were spare ones of the base"
        size = model.get_input_embeddings().weight.shape[0]
        print(f"stripped: {count} predictor tokens; {rows}; the vocabulary has {size} rows")
    print(f"exported to {folder}: load it with AutoModelForCausalLM.from_pretrained")


def _base_rows(model_path: str, run: dict[str, Any] | None) -> int | None:
    """Number of embedding rows in the base model; None if training began with random weights, if the base is not stored
    on this machine, or if it has predictor tokens already."""
    from transformers import AutoConfig, AutoTokenizer

    from stepjepa.chat.tokens import all_predictor_ids

    adapter = Path(model_path) / "adapter_config.json"
    name = None if run is None or (run.get("loaded") or {}).get("pretrain") else run.get("model")
    if adapter.is_file():
        name = read_json_object(adapter, "file of an adapter", "restore it").get("base_model_name_or_path")
    if not name or str(name).startswith("preset:"):
        return None
    try:
        if all_predictor_ids(AutoTokenizer.from_pretrained(name, local_files_only=True)):
            return None
        return int(AutoConfig.from_pretrained(name, local_files_only=True).get_text_config().vocab_size)
    except Exception:  # any error of a base that is not stored here; strip_rows then does without
        return None


EXPORT = Command(run, flags=((ExportFlags, "export"),), epilog=EPILOG)
