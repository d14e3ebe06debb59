"""The model card of a run: base model, data, settings, losses, scores, and the lines that load the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from stepjepa.chat.predictors import saved_with_predictors
from stepjepa.errors import visible
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import atomic_write
from stepjepa.run_folder import run_of

CARD_FILE = "README.md"

MARK = "<!-- Written by stepjepa, which writes it anew as long as this line stands here. -->"

_OBJECTIVE = ("mode", "layout", "predictors", "pairs", "jepa_loss_type", "lbd", "gamma", "jepa_ratio", "max_length")
_TRAINING = (
    *("learning_rate", "lr_scheduler_type", "optim", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_train_epochs", "max_steps", "bf16", "seed"),
)
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {name!r}
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)"""

_LOAD_ADAPTER = """\
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {name!r}
tokenizer = AutoTokenizer.from_pretrained(name)
base = PeftConfig.from_pretrained(name).base_model_name_or_path
model = AutoModelForCausalLM.from_pretrained(base)
if model.get_input_embeddings().num_embeddings < len(tokenizer):
    model.resize_token_embeddings(len(tokenizer))
model = PeftModel.from_pretrained(model, name)"""

_PREDICTORS = (
    "The tokenizer has predictor tokens (`<|predictor_1|>` ...), which only training uses; "
    "`generation_config.json` keeps `generate()` from producing them."
)


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
    jepa, training = run.get("jepa") or {}, run.get("training") or {}
    mode, adapter = str(jepa.get("mode", "regular")), (folder / "adapter_config.json").is_file()
    base, evaluations = base_on_hub(run), summaries(source)
    head = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["stepjepa", *([] if mode == "regular" else ["jepa", _plain(mode)])],
        model_name=_plain(name),
        eval_results=[result for summary in evaluations for result in _eval_results(summary)] or None,
    )
    kept = _OBJECTIVE if mode != "regular" else ("mode", "max_length")
    settings = [(key, jepa[key]) for key in kept if key in jepa]
    settings += [(key, training[key]) for key in _TRAINING if key in training]
    data = [
        (part, Path(str(about.get("file"))).name, about.get("records", "streamed"), about.get("sha256"))
        for part, about in (run.get("data") or {}).items()
    ]
    versions = run.get("versions") or {}
    parts = [
        f"---\n{head.to_yaml()}\n---",
        MARK,
        f"# {_plain(name)}",
        _origin(run, base, mode),
        _table("Data", ("part", "file", "records", "SHA-256"), data),
        _table("Settings", ("setting", "value"), settings),
        *(_scores(summary) for summary in evaluations),
        f"## Loading\n\n```python\n{(_LOAD_ADAPTER if adapter else _LOAD_MODEL).format(name=name)}\n```",
        _PREDICTORS if mode != "regular" and saved_with_predictors(folder) else "",
        "Trained with " + ", ".join(f"{key} {_plain(versions[key])}" for key in versions if key != "platform") + ".",
    ]
    with atomic_write(path) as stream:
        stream.write("\n\n".join(part for part in parts if part) + "\n")


def base_on_hub(run: Mapping[str, Any]) -> str | None:
    """The hub id of the model that a run began from, by its ``run.json``; None for random weights or a local folder."""
    name = str(run.get("model") or "")
    # The fingerprint of a folder is a hash of its weights, that of a model of the hub its commit.
    local = len(str(run.get("model_fingerprint") or "")) == 64 or Path(name).is_dir()
    random = name.startswith("preset:") or (run.get("loaded") or {}).get("pretrain")
    return None if local or random or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else name


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


def _origin(run: Mapping[str, Any], base: str | None, mode: str) -> str:
    name = str(run.get("model") or "unknown")
    if base is None and ((run.get("loaded") or {}).get("pretrain") or name.startswith("preset:")):
        origin = f"from random weights of the shape {_code(Path(name).name)}"
    else:
        origin = f"from {_code(base or Path(name).name)}"
    lora = f", through a LoRA adapter of rank {int(run['lora']['rank'])}" if run.get("lora") else ""
    return f"A causal language model, trained {origin} in mode {_code(mode)}{lora}, by stepjepa."


def _eval_results(summary: Mapping[str, Any]) -> list[EvalResult]:
    """The scores of one evaluation in the form that a hub shows."""
    file = _plain(Path(str(summary.get("test_file"))).name)
    return [
        EvalResult("text-generation", dataset_type=file, dataset_name=file, metric_type=_plain(name), metric_value=mean)
        for name, mean in ((name, score.get("mean")) for name, score in summary["scores"].items())
        if mean is not None
    ]


def _scores(summary: Mapping[str, Any]) -> str:
    settings = summary.get("settings") or {}
    title = f"{summary.get('n')} examples of {_code(Path(str(summary.get('test_file'))).name)}"
    title += f", task {_code(summary.get('task'))}, at most {settings.get('max_new_tokens')} new tokens"
    rows = [(name, score.get("mean"), score.get("low"), score.get("high")) for name, score in summary["scores"].items()]
    return _table(f"Scores: {title}", ("score", "mean", "95 % from", "to"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    """A section with a table in Markdown; nothing where there are no rows."""
    lines = ["| " + " | ".join(map(_code, row)) + " |" for row in rows]
    head = f"## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return "\n".join([head, *lines]) if lines else ""


def _code(value: Any) -> str:
    """A value as inline code, which no reader of Markdown interprets."""
    text = f"{value:.4f}" if isinstance(value, float) and value > 0.01 else "" if value is None else str(value)
    short = visible(text)[:120].replace("`", "'").replace("|", "¦")
    return f"`{short}`" if short else "–"


def _plain(text: Any) -> str:
    """A name in running text, without letters that mean something in Markdown or YAML."""
    return re.sub(r"[^\w .:+/-]", "", visible(str(text)))[:120]
