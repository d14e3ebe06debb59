"""Export a trained model as one plain model folder, on this machine or on a hub. Free of torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, raising_user_errors, visible
from stepjepa.base.files import apply_umask, locked, naming_disk_errors
from stepjepa.base.terminal import note
from stepjepa.config.jepa import Dtype, Pooling
from stepjepa.config.option import check_effects, option
from stepjepa.data.sources import read_records
from stepjepa.evaluation.model_reading import LAYER, LINEAR_MAP, POOLING, PROJECTION_HEADS, ReadingSettings
from stepjepa.store.folder import CARD_FILE, PART, checksum_fault, open_run_folder
from stepjepa.store.prompts import prompts_file
from stepjepa.store.record import RunRecord, record_of, write_record

if TYPE_CHECKING:
    from stepjepa.objectives.fitted import Fitted
    from stepjepa.objectives.inputs import EmbedOptions
    from stepjepa.objectives.jepa import Jepa

TRANSFORMERS_5 = (
    "needs transformers 5, here and in programs that serve it: version 4 can't read the tokenizer, and would "
    "replace the model's rotary frequencies by default ones"
)
"""Version 4 knows neither the tokenizer class nor ``rope_parameters``, which it ignores without an error."""


@dataclass
class ExportSettings:
    """The model to export, and its destination."""

    model_path: str = option(
        help="run or checkpoint folder; with --embeddings any model, also a hub id", metavar="DIR", path="or name"
    )
    output_dir: str | None = option(None, "folder for the model; empty or new", metavar="DIR", path=True)
    embeddings: bool = option(
        False, "write a folder for SentenceTransformer of sentence-transformers 6", only_with="output_dir"
    )
    system_prompt: str | None = option(
        None,
        "system prompt before the queries of a model of layout branched; '' for none (that of training)",
        metavar="TEXT",
        only_with="embeddings",
    )
    layer: int | None = option(None, LAYER, only_with="embeddings")
    pooling: Pooling | None = option(None, POOLING, only_with="embeddings")
    linear_map: str | None = option(None, LINEAR_MAP, metavar="FILE", path=True, only_with="embeddings")
    projection_heads: bool = option(False, PROJECTION_HEADS, only_with="linear_map")
    dtype: Dtype = option("auto", "dtype of the weights", only_with="output_dir")
    trust_remote_code: bool = option(False, "run code that comes with the model", only_with="output_dir")
    push_to_hub: str | None = option(None, "upload to this hub repository, created if missing", metavar="ID")
    hub_private_repo: bool = option(False, "make the repository private", only_with="push_to_hub")
    hub_revision: str | None = option(None, "branch (main)", metavar="NAME", only_with="push_to_hub")
    dry_run: bool = option(False, "list the files that would be uploaded, and ask no hub", only_with="push_to_hub")


def export(settings: ExportSettings) -> None:
    """Export the model, upload it, or both, and print where it is.

    Raises:
        UserError: the settings contradict each other, or the folder holds no model that can be exported.
    """
    if settings.push_to_hub is None and settings.output_dir is None:
        raise UserError("`output_dir` is missing: a folder to export to; or `push_to_hub` to upload what is there")
    check_effects(vars(settings), ExportSettings)
    from stepjepa.store import hub

    if Path(settings.model_path).is_file():
        raise UserError("is a file; name the folder of a run or of a checkpoint", path=settings.model_path)
    folder, name = Path(settings.output_dir or settings.model_path), None
    if settings.output_dir is None:
        if not any(folder.glob("*config.json")):
            raise UserError("holds no model; a run that was stopped has its models in checkpoint-N", path=folder)
        hub.check_uploadable(folder)
    if settings.dry_run:
        _list_files(folder, str(settings.push_to_hub), of_model_path=settings.output_dir is None)
        return
    if settings.push_to_hub is not None:
        # Before the model is loaded: the hub may refuse it.
        name = hub.create_repository(settings.push_to_hub, private=settings.hub_private_repo or None)
    if settings.output_dir is None:
        from stepjepa.inspection.served import check_export

        try:
            print(f"served: {check_export(folder, folder, trust_remote_code=settings.trust_remote_code)}")
        except UserError as error:
            note(visible(str(error)))
        hub.write_card(folder, name=name)
    elif settings.embeddings:
        _export_embeddings(settings, name)
    else:
        _export_model(settings, name)
    if name is not None:
        address = hub.upload(folder, name, revision=settings.hub_revision)
        print(f"uploaded: {visible(address)}")


def _list_files(folder: Path, name: str, *, of_model_path: bool) -> None:
    """Print the files that an upload of a model folder would send, with their sizes, without a request."""
    from stepjepa.store import hub

    if not of_model_path:
        raise UserError("`dry_run` lists the files of `model_path`; leave `output_dir` out, or export first")
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in hub.uploaded_files(folder)}
    for file, size in files.items():
        print(f"{visible(file)}  {size / 1e6:,.2f} MB")
    card = "" if CARD_FILE in files else f", and a {CARD_FILE} that is written first"
    megabytes = f"{sum(files.values()) / 1e6:,.2f} MB"
    print(f"dry run: {counted(len(files), 'file')}, {megabytes}, would go to {visible(name)}{card}")


@contextmanager
def _new_folder(settings: ExportSettings) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the export, and a hidden folder to write to, which gets its name if the block succeeds."""
    if fault := checksum_fault(Path(settings.model_path)):
        raise UserError(f"{fault}; export an earlier checkpoint, or train again", path=settings.model_path)
    folder, model = Path(str(settings.output_dir)), Path(settings.model_path).resolve()
    target = folder.resolve()
    if target in (model, *model.parents) and model.is_dir():
        raise UserError("holds the model to be exported; name another `output_dir`", path=folder)
    open_run_folder(str(folder), None, resumable=False)
    if target.is_dir() and (target.is_mount() or not os.access(target.parent, os.W_OK | os.X_OK)):
        fault = "can't be replaced as a whole, being a mount or in a folder that is read-only for you"
        raise UserError(f"{fault}; name a new folder in it", path=folder)
    part = target.with_name(f".{target.name}{PART}")
    with locked(target):
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            with naming_disk_errors(folder):
                yield folder, part
            apply_umask(part)
            # All files appear at once.
            part.replace(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def _export_embeddings(settings: ExportSettings, name: str | None) -> None:
    """Write the folder for sentence-transformers."""
    from stepjepa.evaluation.sentence_transformer import check_dtype_of_heads, check_readout, write_sentence_transformer

    dtype = settings.dtype
    if settings.projection_heads:
        if dtype == "auto":
            dtype = "float32"
            note("projection heads are trained and written in float32; `embed --dtype float32` gives the same vectors")
        check_dtype_of_heads(dtype, settings.pooling)
    reading = ReadingSettings(
        dtype=dtype,
        layer=settings.layer,
        pooling=settings.pooling,
        linear_map=settings.linear_map,
        projection_heads=settings.projection_heads,
        system_prompt=settings.system_prompt,
        trust_remote_code=settings.trust_remote_code,
    )
    check_readout(reading.check(settings.model_path))
    with _new_folder(settings) as (folder, part):
        # Fitting a map runs the model on its records; else it is only loaded and saved.
        jepa = reading.load(settings.model_path, device="cpu" if settings.linear_map is None else None)
        write_sentence_transformer(jepa, part, name or folder.absolute().name, **_readout(reading, jepa))
    print(f"exported to {folder}: load it with sentence_transformers.SentenceTransformer (version 6)")
    print("call encode_query for queries; encode and encode_document are for documents")


def _readout(reading: ReadingSettings, jepa: Jepa) -> EmbedOptions:
    """Return the readout of a model's embeddings; with the setting ``linear_map`` a map or heads, fitted here."""
    from stepjepa.evaluation.model_maps import fit_linear_map, fit_projection_heads
    from stepjepa.objectives.inputs import options_behind

    if reading.linear_map is None:
        return reading.options
    # The modules of sentence-transformers read one layer.
    heads = partial(fit_projection_heads, all_layers=False)
    fit: Callable[..., Fitted] = heads if reading.projection_heads else fit_linear_map
    records = read_records(reading.linear_map)
    with raising_user_errors():
        fitted = fit(jepa, records, layer=reading.layer, pooling=reading.pooling, batch_size=reading.batch_size)
    note(fitted.describe(reading.linear_map))
    return options_behind(fitted)


def _export_model(settings: ExportSettings, name: str | None) -> None:
    """Load the model, merging an adapter into its base, and save it as a plain model folder."""
    from stepjepa.inspection.served import check_export
    from stepjepa.models.generation_settings import serve_as_trained
    from stepjepa.models.loading import load_for_inference
    from stepjepa.store.fingerprint import tell_changed_base
    from stepjepa.store.hub import write_card

    run, served = record_of(settings.model_path), None
    tell_changed_base(settings.model_path, None if run is None else run.model_fingerprint)
    with _new_folder(settings) as (folder, part):
        model, tokenizer = load_for_inference(
            settings.model_path, device="cpu", dtype=settings.dtype, trust_remote_code=settings.trust_remote_code
        )
        if run is not None and run.jepa is not None:
            # A run of an earlier version saved the model's original template.
            variables = run.jepa.get("chat_template_kwargs")
            serve_as_trained(model, tokenizer, plain=bool(run.jepa.get("plain")), variables=variables)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        record = run or RunRecord(model=Path(settings.model_path).name)
        write_card(part, name=name or folder.absolute().name, run=record)
        if run is not None:
            # Evaluation reads from run.json how the model was trained, and prompts it in the same way.
            write_record(part, replace(run, exported_from=str(settings.model_path)))
            served = check_export(part, settings.model_path, trust_remote_code=settings.trust_remote_code)
        if (prompts := prompts_file(settings.model_path)).is_file():
            shutil.copy(prompts, part)
    print(f"exported to {folder}: load it with AutoModelForCausalLM.from_pretrained")
    if served is not None:
        print(f"served: {visible(served)}")
    print(TRANSFORMERS_5)
