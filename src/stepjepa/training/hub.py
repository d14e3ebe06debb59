"""A model folder for a hub: its card, and the upload of what a model needs and of nothing of this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants

from stepjepa.chat.tokens import saved_with_predictors
from stepjepa.errors import UserError, one_line, visible
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import atomic_write, read_json_object
from stepjepa.offline import STAYS_OFFLINE
from stepjepa.run_folder import run_of

CARD_FILE = "README.md"

MARK = "<!-- Written by stepjepa, which writes it anew as long as this line stands here. -->"

UPLOADED = (
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.py"),
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("vocab.json", "vocab.txt", "*.model", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""What is uploaded of a folder. The rest of a run folder names files of this machine (``run.json``,
``training_args.bin``), holds test data (evaluations), or serves to resume the run (optimizer states)."""

_SETTINGS = (
    *("layout", "predictors", "pairs", "jepa_loss_type", "lbd", "gamma", "jepa_ratio", "max_length", "learning_rate"),
    *("lr_scheduler_type", "optim", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("max_steps", "bf16", "seed"),
)

_CARD = """\
---
{{ card_data }}
---

{{ mark }}

# {{ card_name }}

A causal language model, trained {{ origin }} in mode {{ mode }}, by stepjepa.

| | |
|---|---|
{% for name, value in rows -%}
| {{ name }} | {{ value }} |
{% endfor %}
## Loading

```python
from {{ library }} import {{ loader }}
from transformers import AutoTokenizer

name = {{ quoted }}
tokenizer = AutoTokenizer.from_pretrained(name)
model = {{ loader }}.from_pretrained(name)
```
{% if predictors %}
The tokenizer has predictor tokens (`<|predictor_1|>` ...), which only training uses; `generation_config.json` keeps
`generate()` from producing them.
{% endif %}"""


def write_card(
    folder: Path, *, name: str | None = None, source: str | Path | None = None, run: Mapping[str, Any] | None = None
) -> None:
    """Write the card of a model folder, unless the one that is there was written by somebody else.

    No directory of this machine is in it, and text from files is shown as inline code.

    Args:
        folder: of the model.
        name: under which the model will be loaded; the folder's by default.
        source: run or checkpoint folder that the model came from; ``folder`` by default.
        run: parts of ``run.json``; read from ``source`` by default.
    """
    path, source = folder / CARD_FILE, Path(source or folder)
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    run, name = run or run_of(source) or {"model": source.name}, name or folder.absolute().name
    jepa, base = run.get("jepa") or {}, base_on_hub(run)
    mode = str(jepa.get("mode", "regular"))
    adapter = (folder / "adapter_config.json").is_file()
    results = [(result, score) for summary in summaries(source) for result, score in _results(summary)]
    head = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["stepjepa", *([] if mode == "regular" else ["jepa", _plain(mode)])],
        model_name=_plain(name),
        eval_results=[result for result, _ in results] or None,
    )
    values = {**(run.get("training") or {}), **jepa}
    rows = [(key, values[key]) for key in _SETTINGS if key in values]
    for part, about in (run.get("data") or {}).items():
        told = f"{Path(str(about.get('file'))).name}, {about.get('records')} records, SHA-256 {about.get('sha256')}"
        rows.append((f"data ({part})", told))
    rows += [(f"{result.metric_type} on {result.dataset_name}", score) for result, score in results]
    origin = _code(base or Path(str(run.get("model") or "unknown")).name)
    card = ModelCard.from_template(
        head,
        template_str=_CARD,
        mark=MARK,
        card_name=_plain(name),
        origin=f"from random weights of the shape {origin}" if _is_random(run) else f"from {origin}",
        mode=_code(mode),
        rows=[(_code(key), _code(value)) for key, value in rows],
        library=head.library_name,
        loader="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        quoted=repr(name),
        predictors=mode != "regular" and saved_with_predictors(folder),
    )
    with atomic_write(path) as stream:
        stream.write(card.content)


def _is_random(run: Mapping[str, Any]) -> bool:
    return str(run.get("model") or "").startswith("preset:") or bool((run.get("loaded") or {}).get("pretrain"))


def base_on_hub(run: Mapping[str, Any]) -> str | None:
    """The hub id of the model that a run began from, by its ``run.json``; None for random weights or a local folder."""
    name = str(run.get("model") or "")
    # The fingerprint of a folder is a hash of its weights, that of a model of the hub its commit.
    local = len(str(run.get("model_fingerprint") or "")) == 64 or Path(name).is_dir()
    return None if local or _is_random(run) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else name


def summaries(model_path: str | Path) -> list[dict[str, Any]]:
    """Summaries of the evaluations in a run folder that are of the very weights in it, or in a checkpoint there."""
    folder = Path(model_path)
    places = [folder, folder.parent] if folder.name.startswith("checkpoint-") else [folder]
    found = []
    for file in sorted(file for place in places for file in place.glob("*.summary.json")):
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            if summary["settings"]["model"] == model_fingerprint(folder) and summary["scores"]:
                found.append(summary)
        except (ValueError, KeyError, TypeError):
            continue  # damaged, or written by another program
    return found


def _results(summary: Mapping[str, Any]) -> Iterator[tuple[EvalResult, str]]:
    """The scores of one evaluation in the form that a hub shows, and for people."""
    file = _plain(Path(str(summary.get("test_file"))).name)
    for name, score in summary["scores"].items():
        if (mean := score.get("mean")) is not None:
            about = {"dataset_type": file, "dataset_name": file, "metric_type": _plain(name), "metric_value": mean}
            interval = f"{score.get('low')} to {score.get('high')}"
            yield EvalResult("text-generation", **about), f"{mean:.4f} ({interval}), {summary.get('n')} examples"


def _code(value: Any) -> str:
    """A value as inline code, which no reader of Markdown interprets."""
    short = visible("" if value is None else str(value))[:160].replace("`", "'").replace("|", "¦")
    return f"`{short}`" if short else "–"


def _plain(text: Any) -> str:
    """A name in running text, without letters that mean something in Markdown or YAML."""
    return re.sub(r"[^\w .:+/-]", "", visible(str(text)))[:120]


# -- uploads -----------------------------------------------------------------------------------------------------------


def refuse_offline() -> None:
    """Refuse an upload where ``--offline`` or the environment allows no connection."""
    if os.environ.get(STAYS_OFFLINE) == "1" or constants.is_offline_mode():
        raise UserError(
            "--push_to_hub needs a connection, and --offline (or HF_HUB_OFFLINE) allows none; leave one out"
        )


@contextmanager
def _naming_hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the hub's library raises into a ``UserError`` of one line that says what could not be done."""
    try:
        yield
    except Exception as error:  # a broken connection, a strange answer, a wrong name: each has an error of its own
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = "; set HF_TOKEN in the environment to a token that may write there" if status in (401, 403) else ""
        raise UserError(f"{what}: {one_line(str(error).strip().partition(chr(10))[0])}{remedy}") from None


def create_repository(name: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Make a model repository where there is none, and return its name as ``owner/name``."""
    refuse_offline()
    with _naming_hub_errors(f"can't make the repository '{name}' on the hub"):
        made: str = HfApi().create_repo(name, token=token, private=private, exist_ok=True).repo_id
    return made


def refuse_lone_adapter(folder: str | os.PathLike[str]) -> None:
    """Refuse to upload an adapter whose base model is a folder of this machine, so that nobody else could load it."""
    described = Path(folder) / "adapter_config.json"
    if not described.is_file():
        return
    base = read_json_object(described, "file of an adapter", "restore it").get("base_model_name_or_path")
    if not base or Path(str(base)).is_dir():
        raise UserError(
            "the adapter's base model is a folder of this machine, so that nobody could load the adapter from a hub; "
            "upload it merged: stepjepa export --model_path RUN --output_dir DIR --push_to_hub ID"
        )


def upload(folder: str | os.PathLike[str], name: str, *, message: str, revision: str | None = None) -> str:
    """Upload a model folder and wait for it.

    Args:
        folder: of a whole model or an adapter; see :data:`UPLOADED`.
        name: of a repository that is there.
        message: of the commit.
        revision: branch; main if None.

    Returns:
        The address of the repository.

    Raises:
        UserError: the hub refuses, or can't be reached; with the command that tries again. Nothing local is changed.
    """
    refuse_offline()
    refuse_lone_adapter(folder)
    branch = f" --hub_revision {revision}" if revision else ""
    again = f"stepjepa export --model_path {folder} --push_to_hub {name}{branch}"
    try:
        with _naming_hub_errors(f"can't upload to '{name}'"):
            HfApi().upload_folder(
                repo_id=name,
                folder_path=Path(folder),
                commit_message=message,
                allow_patterns=list(UPLOADED),
                revision=revision,
            )
    except UserError as error:
        raise UserError(f"{error}; {folder} is whole; to try again: {again}") from None
    return f"{HfApi().endpoint}/{name}"
