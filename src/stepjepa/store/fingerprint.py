"""Fingerprints: whether two runs had the same model, weights and data."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from stepjepa.base.errors import visible
from stepjepa.base.files import fingerprint, json_or_empty
from stepjepa.base.terminal import note
from stepjepa.models.base_path import base_as_trained

# The files of a model folder that affect its answers; "*.py" is model code.
_MODEL_FILES = (
    *("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "config.json", "generation_config.json", "*.py"),
    *("adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "*.gguf"),
)
_CHUNK, _CHUNKS = 2**16, 256


def model_fingerprint(path: str | os.PathLike[str]) -> str:
    """Hash the files of a model folder and of an adapter's base model; return a hub id unchanged.

    Of files above 16 MiB only 256 evenly spaced chunks are hashed, which is enough since training changes all weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        return str(path)
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern)}):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        for content in _parts(file):
            digest.update(content)
    base = _base_folder(folder)
    if base is not None:
        digest.update(model_fingerprint(base).encode())
    return digest.hexdigest()


def _base_folder(folder: Path) -> Path | None:
    """Return the folder of the base model of an adapter; None if there is no such folder, or no adapter."""
    # A damaged configuration is reported when the model is loaded; an adapter that names itself has no other base.
    base = json_or_empty(folder / "adapter_config.json").get("base_model_name_or_path")
    place = Path(base_as_trained(folder, base)) if isinstance(base, str) and base else folder
    return place if place.is_dir() and place.resolve() != folder.resolve() else None


def tell_changed_base(model_path: str | os.PathLike[str], before: str | None) -> None:
    """Print a note where an adapter's base model is not that of its training: a folder that was trained anew.

    Args:
        model_path: a run or checkpoint folder.
        before: the fingerprint of the base in the record of the run; that of a hub model is not compared.
    """
    base = _base_folder(Path(model_path))
    # A hub model has the name of a commit.
    if base is not None and before is not None and len(before) == 64 and model_fingerprint(base) != before:
        note(
            f"the base model in {visible(str(base))} has changed since the adapter in {visible(str(model_path))} was "
            "trained on it, so that both together are another model; bring back the earlier one, or train again"
        )


def _parts(file: Path) -> Iterator[bytes]:
    """Yield the content of a file; of a large one, evenly spaced chunks."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _CHUNK * _CHUNKS:
            yield stream.read()
            return
        for number in range(_CHUNKS):
            stream.seek(number * (size - _CHUNK) // (_CHUNKS - 1))
            yield stream.read(_CHUNK)


def equal_weights(first: Path, second: Path) -> bool | None:
    """Return whether the trained weights of two folders are equal bit for bit; None if one of them holds none."""
    hashes, others = (
        {file.name: fingerprint(file) for file in folder.glob("*.safetensors")} for folder in (first, second)
    )
    return hashes == others if hashes and others else None


def hub_commit(name: str) -> str | None:
    """Look up the commit of a model that was loaded by its hub id, in the hub's cache; None for other names."""
    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a preset, a folder
        return None
    # snapshots/COMMIT/config.json
    return Path(path).parent.name if isinstance(path, str) else None
