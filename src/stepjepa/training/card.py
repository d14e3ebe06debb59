"""The model card: what a model was trained on and how, what it came to, how it is loaded."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from stepjepa.errors import visible
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import atomic_write, read_json_object
from stepjepa.run_folder import run_of
from stepjepa.text.predictors import saved_with_predictors

CARD_FILE = "README.md"

MARK = "<!-- Written by stepjepa, which writes it anew as long as this line stands here. -->"

# Longest text from elsewhere that a card shows.
_LONGEST = 120

# As a hub writes the names of its repositories.
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# What of a path tells how this machine is arranged; inside JSON as well.
_DIRECTORIES = re.compile(r"""(?:^|(?<=[="'\s:,\[{]))(?:~\w*|\.{1,2})?/(?:[^/"',]+/)*(?=[^/"',])""")

# Flags that say where something is uploaded or reported, not how the model was made.
_NOT_SHOWN = ("report_to", "run_name", "project", "trackio_", "hub_", "push_to_hub", "cache_dir", "no_cache")

_MODES = {"regular": "plain fine-tuning", "llm-jepa": "LLM-JEPA", "step-jepa": "Step-JEPA"}

# Settings of the objective that the card names, where it has views.
_OBJECTIVE = ("layout", "predictors", "pairs", "jepa_loss_type", "lbd", "gamma", "jepa_ratio", "labels", "max_length")

_RESULTS = ("loss", "lm_loss", "jepa_loss", "matched_similarity", "shuffled_similarity", "source_rank", "target_rank")


def base_on_hub(run: Mapping[str, Any]) -> str | None:
    """The hub id of the model that a run began from; None for random weights or a local folder.

    Args:
        run: parts of ``run.json``.
    """
    name = str(run.get("model") or "")
    # A folder is told apart by the hash of its weights, a model of the hub by its commit.
    local = len(str(run.get("model_fingerprint") or "")) == 64 or Path(name).is_dir()
    loaded = run.get("loaded") or {}
    if local or name.startswith("preset:") or loaded.get("pretrain") or not _HUB_ID.fullmatch(name):
        return None
    return name


def model_card(
    run: Mapping[str, Any],
    name: str,
    *,
    results: Mapping[str, Any] | None = None,
    scores: Sequence[Mapping[str, Any]] = (),
    adapter: bool = False,
    predictors: bool = True,
) -> ModelCard:
    """The card of a model.

    Args:
        run: of ``run.json``; what is missing is left out.
        name: under which the model is loaded: a folder or a hub id.
        results: losses and monitors at the end, those on held-out records beginning with ``eval_``; those of ``run`` if
            None.
        scores: summaries of evaluations.
        adapter: the folder holds an adapter, not a whole model.
        predictors: the tokenizer has predictor tokens.

    Returns:
        The card. Whatever comes from files or flags stands in it as text, without directories of this machine.
    """
    mode = (run.get("jepa") or {}).get("mode", "regular")
    data = ModelCardData(
        base_model=base_on_hub(run),
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["stepjepa", *([] if mode == "regular" else ["jepa", mode])],
    )
    shown = run.get("results", {}) if results is None else results
    parts = [
        f"---\n{data.to_yaml()}\n---",
        MARK,
        f"# {_plain(Path(name).name)}",
        _begin(run, mode),
        _data(run),
        _objective(run, mode),
        _flags(run),
        _results(shown),
        _scores(scores),
        _loading(name, adapter=adapter, base=base_on_hub(run)),
        _limits(predictors and mode != "regular"),
        _versions(run),
    ]
    return ModelCard("\n\n".join(part for part in parts if part) + "\n", ignore_metadata_errors=False)


def write_card(folder: str | Path, card: ModelCard) -> None:
    """Write a card into a model folder, unless the one that is there is somebody's own."""
    path = Path(folder) / CARD_FILE
    if is_somebodys_own(path):
        return
    with atomic_write(path) as stream:
        stream.write(str(card))


def renew_card(folder: Path, name: str | None = None) -> None:
    """Write the card of a run folder anew, since evaluations may have come to it, or a name; others are left alone.

    Args:
        folder: any.
        name: under which the model is loaded from now on; by default the folder's.
    """
    run, scores = run_of(folder), summaries(folder)
    if run is None or (not scores and name is None):
        return
    card = model_card(
        run,
        name or folder.absolute().name,
        results=results_of(folder),
        scores=scores,
        adapter=(folder / "adapter_config.json").is_file(),
        predictors=saved_with_predictors(folder),
    )
    write_card(folder, card)


def is_somebodys_own(path: Path) -> bool:
    """Whether there is a card that may not be replaced, since we have not written it."""
    return path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")


def results_at(history: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    """Losses and monitors at a step, for :func:`model_card`.

    Args:
        history: ``log_history`` of the Trainer's state.
        step: its ``global_step``.
    """
    logs: dict[str, Any] = {}
    for line in history:
        logs |= line
    return {**logs, "steps": step, "tokens": logs.get("num_tokens")}


def results_of(model_path: str | Path) -> dict[str, Any] | None:
    """Losses and monitors of a checkpoint folder, from its own logs; None for other folders, or where none are kept."""
    state = Path(model_path) / "trainer_state.json"
    if not Path(model_path).name.startswith("checkpoint-") or not state.is_file():
        return None
    found = read_json_object(state, "state of a checkpoint", "name another checkpoint")
    history, step = found.get("log_history"), found.get("global_step")
    lines = [line for line in history if isinstance(line, dict)] if isinstance(history, list) else []
    return results_at(lines, step) if isinstance(step, int) else {}


def summaries(model_path: str | Path) -> list[dict[str, Any]]:
    """Summaries of the evaluations in a run folder that are of the very model in it, by name.

    Args:
        model_path: run folder, or checkpoint folder in one.
    """
    folder = Path(model_path)
    places = [folder, folder.parent] if folder.name.startswith("checkpoint-") else [folder]
    found, model = [], None
    for file in sorted(file for place in places for file in place.glob("*.summary.json")):
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            model = model or model_fingerprint(folder)
            if summary["settings"]["model"] == model and summary["scores"]:
                found.append(summary)
        except (ValueError, KeyError, TypeError):
            continue  # no summary of ours, or a damaged one
    return found


# -- sections ---------------------------------------------------------------------------------------------------------


def _begin(run: Mapping[str, Any], mode: str) -> str:
    base = base_on_hub(run)
    loaded = run.get("loaded") or {}
    name = _code(Path(str(run.get("model") or "unknown")).name)
    if base is not None:
        origin = f"trained from `{base}`"
    elif loaded.get("pretrain") or str(run.get("model") or "").startswith("preset:"):
        origin = f"trained from random weights of the shape {name}"
    else:
        print_of = run.get("model_fingerprint")
        origin = f"trained from the local model {name}" + (f" (fingerprint `{print_of[:16]}`)" if print_of else "")
    lora = run.get("lora")
    way = f", through a LoRA adapter of rank {int(lora['rank'])}" if lora else ""
    return f"A causal language model, {origin} with {_MODES.get(mode, _code(mode))}{way}, by stepjepa."


def _data(run: Mapping[str, Any]) -> str:
    rows = []
    for part, found in (run.get("data") or {}).items():
        fingerprint = found.get("sha256") or found.get("sha256_of_first_mib") or ""
        split = f", {found['eval_split']:.0%} of it held out" if "eval_split" in found else ""
        cells = [f"{_code(part)}{split}", _code(Path(str(found.get("file"))).name), found.get("records", "streamed")]
        rows.append(f"| {' | '.join(map(str, cells))} | {_code(fingerprint)} |")
    if not rows:
        return ""
    lines = ["## Data", "", "| part | file | records | SHA-256 |", "|---|---|---|---|", *rows]
    counts, tokens = run.get("counts") or {}, run.get("tokens") or {}
    told = [f"{value} {_plain(name)}" for name, value in counts.items() if value]
    # Of a stream nothing is known but what has been met of it.
    if tokens.get("ratio") is not None:
        told.append(f"{tokens['all']} tokens, {tokens['ratio']:.2f} of plain fine-tuning's")
    return "\n".join([*lines, "", f"As trained on: {', '.join(told)}."] if told else lines)


def _objective(run: Mapping[str, Any], mode: str) -> str:
    jepa = run.get("jepa") or {}
    names = [name for name in _OBJECTIVE if mode != "regular" or name in ("labels", "max_length")]
    rows = [f"| `{name}` | {_code(jepa[name])} |" for name in names if name in jepa]
    heads = ["## Objective", "", f"Mode {_code(mode)}.", "", "| setting | value |", "|---|---|"]
    return "\n".join([*heads, *rows]) if rows else ""


def _flags(run: Mapping[str, Any]) -> str:
    """The command line, without directories."""
    given: Sequence[str] = run.get("arguments") or []
    words: list[str] = []
    skipping = False
    for word in map(str, given):
        if word.startswith("--"):
            skipping = word[2:].startswith(_NOT_SHOWN)
        if not skipping:
            words.append(shlex.quote(visible(_DIRECTORIES.sub("", word))))
    if not words:
        return ""
    lines = " ".join(words).replace("`", "'").replace(" --", " \\\n    --")
    return f"## Flags\n\n```text\nstepjepa train {lines}\n```"


def _results(results: Mapping[str, Any]) -> str:
    last = {**(results.get("last_log") or {}), **{k: v for k, v in results.items() if k != "last_log"}}
    rows = []
    for name in _RESULTS:
        values = [last.get(name), last.get(f"eval_{name}")]
        if any(isinstance(value, int | float) for value in values):
            rows.append(f"| `{name}` | {' | '.join(_number(value) for value in values)} |")
    if not rows:
        return ""
    told = f"After {last['steps']} steps" if "steps" in last else "At the end"
    told += f" and {last['tokens']:,.0f} tokens" if last.get("tokens") else ""
    heads = ["## Losses", "", f"{told}:", "", "| | training, last log | held out |", "|---|---|---|"]
    note = []
    if any(f"{side}matched_similarity" in last for side in ("", "eval_")):
        note = [
            "",
            "Similarity is the cosine of paired views, against shuffled pairs; rank is the effective rank of the",
        ]
        note += ["embeddings. A similarity that is high for both says that the embeddings have collapsed."]
    return "\n".join([*heads, *rows, *note])


def _scores(scores: Sequence[Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for summary in scores:
        settings = summary.get("settings", {})
        asked = f"{summary['n']} examples of {_code(Path(str(summary.get('test_file'))).name)}"
        lines += ["", f"{asked}, task {_code(summary.get('task'))}, {_decoding(settings)}:", ""]
        lines += ["| score | mean | 95 % interval |", "|---|---|---|"]
        for name, score in summary["scores"].items():
            ends = "" if score.get("low") is None else f"{score['low']:.4f} to {score['high']:.4f}"
            mark = " (headline)" if name == summary.get("headline") else ""
            lines.append(f"| {_code(name)}{mark} | {_number(score.get('mean'))} | {ends} |")
        if summary.get("gold_loss") is not None:
            lines += ["", f"LM loss per token of the right answers: {_number(summary['gold_loss'])}."]
    return "\n".join(["## Scores", *lines]) if lines else ""


def _decoding(settings: Mapping[str, Any]) -> str:
    temperature = settings.get("temperature") or 0.0
    length = settings.get("max_new_tokens")
    return ("greedy" if not temperature else f"temperature {temperature}") + (
        f", at most {length} new tokens" if length else ""
    )


def _loading(name: str, *, adapter: bool, base: str | None) -> str:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if adapter:
        lines = ["from peft import PeftConfig, PeftModel", *lines]
    lines += [f"name = {name!r}", "tokenizer = AutoTokenizer.from_pretrained(name)"]
    if adapter:
        origin = "PeftConfig.from_pretrained(name).base_model_name_or_path" if base is None else repr(base)
        lines += [
            f"model = AutoModelForCausalLM.from_pretrained({origin})",
            "if model.get_input_embeddings().num_embeddings < len(tokenizer):",
            "    model.resize_token_embeddings(len(tokenizer))",
            "model = PeftModel.from_pretrained(model, name)",
        ]
    else:
        lines += ["model = AutoModelForCausalLM.from_pretrained(name)"]
    return "\n".join(["## Loading", "", "```python", *lines, "```"])


def _limits(predictors: bool) -> str:
    if not predictors:
        return ""
    return (
        "The tokenizer has predictor tokens (`<|predictor_1|>` ...), which only training uses; "
        "`generation_config.json` keeps `generate()` from producing them."
    )


def _versions(run: Mapping[str, Any]) -> str:
    named = ("stepjepa", "torch", "transformers", "peft", "tokenizers")
    found = run.get("versions") or {}
    told = [f"{name} {_plain(str(found[name]))}" for name in named if name in found]
    return f"Trained with {', '.join(told)}." if told else ""


# -- texts from elsewhere ---------------------------------------------------------------------------------------------


def _code(text: Any) -> str:
    """A text as inline code, which no reader of Markdown interprets."""
    short = visible(str(text))
    short = short if len(short) <= _LONGEST else f"{short[:_LONGEST]}..."
    return f"`{short.replace('`', chr(39)).replace('|', '¦')}`" if short else "–"


def _plain(text: str) -> str:
    """A name in running text: letters that mean something in Markdown or HTML are left out."""
    return re.sub(r"[^\w .:+/-]", "", visible(text))[:_LONGEST]


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "–"
