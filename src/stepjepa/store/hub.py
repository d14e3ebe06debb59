"""A model folder for a hub: its card, and the upload of what a model needs and of nothing of this machine."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCardData, constants
from huggingface_hub.utils import filter_repo_objects

from stepjepa.base.errors import UserError, one_line, visible
from stepjepa.base.files import atomic_write, read_json_object
from stepjepa.base.offline import STAYS_OFFLINE
from stepjepa.store.folder import CARD_FILE
from stepjepa.store.record import RunRecord, record_of

MARK = "<!-- Written by stepjepa, which writes it anew as long as this line stands here. -->"

UPLOADED = [
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.py"),
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("vocab.json", "vocab.txt", "*.model", "chat_template.jinja", "additional_chat_templates/*.jinja"),
]
"""What is uploaded of a folder. The rest of a run folder names files of this machine (``run.json``,
``training_args.bin``), holds test data (evaluations), or serves to resume the run (optimizer states)."""

_CARD = """\
---
{head}
---

{mark}

# {name}

A causal language model, trained from `{origin}` in mode `{mode}`, by stepjepa. Predictor tokens
(`<|predictor_1|>` ...) of its tokenizer are for training alone; `generate()` never produces them.

```python
from {library} import {loader}
from transformers import AutoTokenizer

name = {quoted}
tokenizer = AutoTokenizer.from_pretrained(name)
model = {loader}.from_pretrained(name)
```
"""


def write_card(folder: Path, *, name: str | None = None, run: RunRecord | None = None) -> None:
    """Write the card of a model folder, to be loaded by ``name``, unless somebody else's is there.

    ``run`` is the record of the run that trained the model, by default the folder's. No directory of this machine is in
    the card.
    """
    path = folder / CARD_FILE
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    run, name = run or record_of(folder) or RunRecord(model=folder.name), name or folder.absolute().name
    mode, base = _plain((run.jepa or {}).get("mode", "regular")), base_on_hub(run)
    adapter = (folder / "adapter_config.json").is_file()
    head = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["stepjepa", *([] if mode == "regular" else ["jepa", mode])],
        model_name=_plain(name),
    )
    text = _CARD.format(
        head=head,
        mark=MARK,
        name=_plain(name),
        origin=base or _plain(Path(str(run.model)).name),
        mode=mode,
        library=head.library_name,
        loader="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        quoted=repr(name),
    )
    with atomic_write(path) as stream:
        stream.write(text)


def base_on_hub(run: RunRecord) -> str | None:
    """The hub id of the model that a run began from; None for random weights or a local folder."""
    name = run.model or ""
    # The fingerprint of a folder is a hash of its weights, that of a model of the hub its commit.
    local = len(run.model_fingerprint or "") == 64 or Path(name).is_dir()
    random = name.startswith("preset:") or run.loaded.get("pretrain")
    return None if local or random or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else name


def _plain(text: object) -> str:
    """A name in running text, without letters that mean something in Markdown or YAML."""
    return re.sub(r"[^\w .:+/-]", "", visible(str(text)))[:120]


# -- uploads -----------------------------------------------------------------------------------------------------------


def refuse_offline() -> None:
    """Refuse an upload where ``--offline`` or the environment allows no connection."""
    if os.environ.get(STAYS_OFFLINE) == "1" or constants.is_offline_mode():
        raise UserError("`push_to_hub` needs a connection, which `offline` (or HF_HUB_OFFLINE) forbids; leave one out")


@contextmanager
def _naming_hub_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever the hub's library raises into a ``UserError`` of one line that says what could not be done."""
    try:
        yield
    except Exception as error:  # a broken connection, a strange answer, a wrong name: each has an error of its own
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            remedy = f"; set HF_TOKEN in the environment to a token that may write there{remedy}"
        raise UserError(f"{what}: {one_line(str(error).strip().partition(chr(10))[0])}{remedy}") from None


def create_repository(name: str, *, private: bool | None = None) -> str:
    """Make a model repository where there is none, and return its name as ``owner/name``."""
    refuse_offline()
    with _naming_hub_errors(f"can't make the repository '{name}' on the hub"):
        return str(HfApi().create_repo(name, private=private, exist_ok=True).repo_id)


def refuse_lone_adapter(folder: str | os.PathLike[str]) -> None:
    """Refuse to upload an adapter whose base model is a folder of this machine, so that nobody else could load it."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return
    base = read_json_object(path, "file of an adapter", "restore it").get("base_model_name_or_path")
    if not base or Path(str(base)).is_dir():
        raise UserError(
            "the adapter's base model is a folder of this machine, so that nobody could load the adapter from a hub; "
            "upload it merged: stepjepa export --model_path RUN --output_dir DIR --push_to_hub ID"
        )


def uploaded_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a model folder that :func:`upload` sends, sorted by name."""
    root = Path(folder)
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    return list(filter_repo_objects(files, allow_patterns=UPLOADED, key=lambda file: file.relative_to(root).as_posix()))


def upload(folder: str | os.PathLike[str], name: str, *, revision: str | None = None) -> str:
    """Upload what a model folder holds of :data:`UPLOADED` to a repository; returns its address.

    UserError if the hub refuses or can't be reached, with the command that tries again.
    """
    again = f"stepjepa export --model_path {folder} --push_to_hub {name}"
    again += f" --hub_revision {revision}" if revision else ""
    with _naming_hub_errors(f"can't upload to '{name}'", f"; {folder} is whole; to try again: {again}"):
        HfApi().upload_folder(
            repo_id=name,
            folder_path=Path(folder),
            allow_patterns=UPLOADED,
            commit_message="Uploaded by stepjepa",
            revision=revision,
        )
    return f"{HfApi().endpoint}/{name}"
