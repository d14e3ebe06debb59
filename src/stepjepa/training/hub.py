"""A model folder for a hub: its card, and the upload of what a model needs and of nothing of this machine."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData, constants
from huggingface_hub.utils import disable_progress_bars
from transformers import TrainerCallback

from stepjepa.chat.tokens import saved_with_predictors
from stepjepa.errors import UserError, one_line, visible
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import atomic_write, read_json_object
from stepjepa.offline import STAYS_OFFLINE
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
        (part, Path(str(about.get("file"))).name, about.get("records"), about.get("sha256"))
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


logger = logging.getLogger(__name__)

UPLOADED = (
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.py"),
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("vocab.json", "vocab.txt", "*.model", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""What is uploaded of a folder. The rest of a run folder names files of this machine (``run.json``,
``training_args.bin``), holds test data (evaluations), or serves to resume the run (optimizer states)."""


def refuse_offline() -> None:
    """Refuse an upload where ``--offline`` or the environment allows no connection."""
    if os.environ.get(STAYS_OFFLINE) == "1" or constants.is_offline_mode():
        raise UserError(
            "--push_to_hub needs a connection, and --offline (or HF_HUB_OFFLINE) allows none; leave one out"
        )


@contextmanager
def naming_hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the hub's library raises into a ``UserError`` of one line that says what could not be done."""
    try:
        yield
    except Exception as raised:  # a broken connection, a strange answer, a wrong name: each has an error of its own
        error = raised.__cause__ if isinstance(raised, RuntimeError) and raised.__cause__ else raised
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = one_line(getattr(error, "server_message", None) or str(error).strip().partition("\n")[0])
        remedy = "; set HF_TOKEN in the environment to a token that may write there" if status in (401, 403) else ""
        number = "" if status is None or str(status) in reason else f"{status} "
        raise UserError(f"{what}: {number}{reason.rstrip(' .')}{remedy}") from None


def create_repository(name: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Make a model repository where there is none, and return its name as ``owner/name``."""
    refuse_offline()
    with naming_hub_errors(f"can't make the repository '{name}' on the hub"):
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


def upload(
    folder: str | os.PathLike[str], name: str, *, message: str, revision: str | None = None, token: str | None = None
) -> str:
    """Upload a model folder and wait for it.

    Args:
        folder: of a whole model or an adapter; see :data:`UPLOADED`.
        name: of a repository that is there.
        message: of the commit.
        revision: branch; main if None.
        token: instead of HF_TOKEN or the saved login.

    Returns:
        The address of the repository.

    Raises:
        UserError: the hub refuses, or can't be reached. Nothing local is changed.
    """
    refuse_offline()
    refuse_lone_adapter(folder)
    api = HfApi()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with naming_hub_errors(f"can't upload to '{name}'"):
        api.upload_folder(
            repo_id=name,
            folder_path=Path(folder),
            commit_message=message,
            token=token,
            allow_patterns=list(UPLOADED),
            revision=revision,
        )
    return f"{api.endpoint}/{name}"


class UploadCallback(TrainerCallback):
    """Uploads every checkpoint in the background; an upload that fails is told, and training goes on.

    Args:
        name: of the repository; None on processes that upload nothing.
        run: what the model card says where there is no ``run.json``.
    """

    def __init__(self, name: str | None, run: dict[str, Any]) -> None:
        self._name, self._run = name, run
        self._upload: Future[str] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for an upload before the next checkpoint is saved: what it reads may be deleted then."""
        if control.should_save:
            self.on_train_end(args, state, control)

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to upload the checkpoint that has just been saved."""
        if self._name is None or not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_card(folder, name=self._name, run=run_of(args.output_dir) or self._run)
        about = {"message": f"Training in progress, step {state.global_step}", "revision": args.hub_revision}
        self._upload = HfApi().run_as_future(partial(upload, folder, self._name, token=args.hub_token, **about))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for an upload."""
        pending, self._upload = self._upload, None
        if pending is not None and (error := pending.exception()) is not None:
            logger.warning("%s; training goes on", error)
