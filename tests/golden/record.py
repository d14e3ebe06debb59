"""Golden figures of training: the loss parts and gradient norms of the first steps of small runs of many kinds.

``python tests/golden/record.py [CASE ...]`` trains the cases and writes ``golden.json`` beside itself. Only what people
use is driven, the command line and ``metrics.jsonl``, so that the figures outlive any rewrite of what is behind.
Records, tokenizer and weights are made here and by nothing of the package, so that they do not change with it.

Everything is float32 on one CPU thread, without dropout, at a constant learning rate. Two ways of computing the same
thing, one row a record and one a view, were measured to part by no more than 1e-6 of a figure within twenty steps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# Nothing is fetched; said before the hub's library is imported, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 5
RECORDS = 64
SEED = 7

# ---------------------------------------------------------------------------------------------------- records

_NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Fay")
_THINGS = ("apples", "books", "coins", "pens", "cups")
_SYSTEM = "You add numbers."


def _record(user: str, assistant: str, system: str | None = None, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"messages": messages, **fields}


def chat_records() -> list[dict[str, Any]]:
    """One task and one answer each: every third with a system message, every eighth with a turn before."""
    records = []
    for index in range(RECORDS):
        first, second = 3 + index * 7 % 29, 2 + index * 11 % 31
        name, thing = _NAMES[index % 6], _THINGS[index % 5]
        question = f"{name} has {first} {thing} and gets {second} more. How many {thing}?"
        answer = f"{first} + {second} = {first + second}" if index % 2 else f"{name} has {first + second} {thing}."
        record = _record(question, answer, _SYSTEM if index % 3 == 0 else None)
        if index % 8 == 5:
            earlier = [{"role": "user", "content": f"Who is {name}?"}, {"role": "assistant", "content": "A friend."}]
            start = len(record["messages"]) - 2
            record["messages"][start:start] = earlier
        records.append(record)
    return records


def step_records() -> list[dict[str, Any]]:
    """Three to five steps each, but every ninth has one alone; every fourth with a system message."""
    records = []
    for index in range(RECORDS):
        numbers = [1 + (index * 5 + place * 7) % 13 for place in range(3 + index % 3)]
        name, thing = _NAMES[index % 6], _THINGS[index % 5]
        steps, total = [], numbers[0]
        for number in numbers[1:]:
            steps.append(f"{total} + {number} = {total + number}.")
            total += number
        steps.append(f"{name} has {total} {thing}.")
        if index % 9 == 4:
            steps = steps[-1:]
        question = f"{name} gets {', '.join(map(str, numbers))} {thing}. How many?"
        records.append(_record(question, "\n\n".join(steps), _SYSTEM if index % 4 == 1 else None))
    return records


def view_records() -> list[dict[str, Any]]:
    """The chats with explicit views: strings in most, lists of one message in every fourth, none in every seventh."""
    records = chat_records()
    for index, record in enumerate(records):
        if index % 7 == 3:
            continue
        text, code = f"Sum of task {index}: {_THINGS[index % 5]}.", f"add({index}, {index % 5})"
        if index % 4 == 2:
            record["text"] = [{"role": "user", "content": text}]
            record["code"] = [{"role": "assistant", "content": code}]
        else:
            record |= {"text": text, "code": code}
    return records


FILES = {"chat.jsonl": chat_records, "steps.jsonl": step_records, "views.jsonl": view_records}

# -------------------------------------------------------------------------------------------------- tokenizer

_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
# As the large tokenizers split: the line ends behind a full stop belong to it, every digit stands alone.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = ("system", "user", "assistant", " has", " gets", " more", " many", " and", " add", "How", "You", "numbers")
_WORDS += ("ĊĊ", ".ĊĊ", " +", " =", *_NAMES, *(f" {thing}" for thing in _THINGS))
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer whose merges are written down, not learned; ``.`` and a blank line are one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in (word.replace(" ", "Ġ") for word in _WORDS):
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if pair not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# ----------------------------------------------------------------------------------------------------- models

WINDOW = 12
_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 512}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

# Folder -> model type and configuration. Those without "spare" have no row for a predictor token and must grow.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA | {"spare": 40}),
    "gpt2": ("gpt2", _GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gemma3": (
        "gemma3_text",
        _LLAMA
        | {"sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": _LAYERS, "query_pre_attn_scalar": 8}
        | {"spare": 40},
    ),
    "mamba": ("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2, "spare": 40}),
    "lfm2": (
        "lfm2",
        {key: value for key, value in _LLAMA.items() if key not in ("head_dim", "attention_dropout")}
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "spare": 40},
    ),
}


def make_model(name: str, tokens: int) -> Any:
    """A tiny model in float32, its weights drawn here in the order of their names, far from uniform attention.

    Args:
        name: key of ``MODELS``.
        tokens: of the tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, given = MODELS[name]
    shape = {key: value for key, value in given.items() if key != "spare"}
    config = AutoConfig.for_model(
        family, vocab_size=tokens + given.get("spare", 0), bos_token_id=None, eos_token_id=2, pad_token_id=0, **shape
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # norms and biases, around what they start as
                parameter.add_(noise, alpha=0.05)
            elif "A_log" not in key:
                parameter.copy_(noise * 0.15)
    return model


def make_material(folder: Path) -> None:
    """Write the records, and every model with its tokenizer, into a folder that has none of them yet."""
    if (folder / "made").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in FILES.items():
        text = "".join(json.dumps(record) + "\n" for record in records())
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer = make_tokenizer()
    for name in MODELS:
        make_model(name, len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "made").write_text("")


# ------------------------------------------------------------------------------------------------------ cases

_CHAT = ["--train_file", "chat.jsonl"]
_STEPS = ["--train_file", "steps.jsonl", "--step_jepa"]
_INFONCE = ["--jepa_loss_type", "infonce", "--lbd", "0.02"]
_SEPARATE = [*_CHAT, "--layout", "separate"]
_BRANCHED = [*_CHAT, "--layout", "branched"]
_INPLACE = [*_STEPS, "--layout", "inplace"]
# The fourth step of an epoch has micro-batches of 6 and 4 records.
_UNEVEN = ["--batch_size", "6", "--grad_accum", "3"]

CASES: dict[str, list[str]] = {
    # Plain training.
    "regular": [*_CHAT, "--regular"],
    "regular_uneven": [*_CHAT, "--regular", *_UNEVEN],
    "regular_labels_all": [*_CHAT, "--regular", "--labels", "all"],
    "regular_labels_reference": [*_CHAT, "--regular", "--labels", "reference"],
    "regular_stp": [*_CHAT, "--regular", "--stp", "0.1"],
    # LLM-JEPA.
    "separate_k1": [*_SEPARATE, "--predictors", "1"],
    "separate_uneven": [*_SEPARATE, *_UNEVEN],
    "separate_front_pred": [*_SEPARATE, "--front_pred", "--predictors", "2"],
    "separate_last_token": [*_SEPARATE, "--last_token", "-2"],
    "separate_pooling_mean_k0": [*_SEPARATE, "--pooling", "mean", "--predictors", "0"],
    "separate_explicit_views": ["--train_file", "views.jsonl", "--layout", "separate"],
    "separate_plain": [*_SEPARATE, "--plain"],
    "branched_k3": [*_BRANCHED, "--predictors", "3"],
    "branched_reverse_pred": [*_BRANCHED, "--reverse_pred"],
    "branched_pairs_all": [*_BRANCHED, "--pairs", "all"],
    # Step-JEPA.
    "step_branched": _STEPS,
    "step_branched_k0": [*_STEPS, "--predictors", "0"],
    "step_branched_pairs_all": [*_STEPS, "--pairs", "all"],
    "step_branched_truncate": [*_STEPS, "--over_length", "truncate", "--max_length", "70"],
    "step_branched_skip": [*_STEPS, "--over_length", "skip", "--max_length", "95"],
    "step_branched_pair_distance": [*_STEPS, "--pair_distance", "2"],
    "step_branched_pooling_mean": [*_STEPS, "--pooling", "mean"],
    "step_inplace": _INPLACE,
    # Distances, other terms, weights.
    "mse": [*_STEPS, "--jepa_loss_type", "mse"],
    "infonce": [*_STEPS, *_INFONCE],
    "infonce_uneven": [*_STEPS, *_INFONCE, *_UNEVEN],
    "sigreg_accumulated": [*_STEPS, "--sigreg", "0.05", "--batch_size", "4", "--grad_accum", "2"],
    "variance_covariance": [*_STEPS, "--variance", "1", "--covariance", "0.04"],
    "gamma": [*_STEPS, "--gamma", "0.5", "--lbd", "0.5"],
    "target_ema": [*_STEPS, "--target_grad", "ema", "--ema_decay", "0.8"],
    "jepa_ratio": [*_STEPS, "--jepa_ratio", "0.5"],
    "lbd_cosine": [*_STEPS, "--lbd_schedule", "cosine", "--max_steps", "20"],
    "head_mlp": [*_STEPS, "--predictor_head", "mlp"],
    "jepa_layer": [*_STEPS, "--jepa_layer", "1"],
    "lora": [*_STEPS, "--lora", "--lora_rank", "4"],
    "gradient_checkpointing": [*_STEPS, "--gradient_checkpointing"],
    # Other models; the last two have layers that run as rows.
    "gpt2": [*_STEPS, "--model_name", "gpt2"],
    "gemma3_inplace": [*_INPLACE, "--model_name", "gemma3"],
    "mamba_steps": [*_STEPS, "--pairs", "all", "--model_name", "mamba"],
    "lfm2_separate": [*_SEPARATE, "--model_name", "lfm2"],
}
"""Name -> flags of ``stepjepa train`` beside those of ``COMMON``; a file or model is one of the material's."""

COMMON: dict[str, str] = {
    "--model_name": "llama",
    "--batch_size": "8",
    "--grad_accum": "1",
    "--dtype": "float32",
    "--learning_rate": "1e-3",
    "--lr_scheduler_type": "constant",
    "--seed": str(SEED),
    "--logging_steps": "1",
    "--save_strategy": "no",
    "--report_to": "none",
    "--max_steps": str(STEPS),
}


def command(name: str, folder: Path, output: Path) -> list[str]:
    """The arguments of a case, with the material of a folder and a run folder."""
    flags = list(CASES[name])
    # What was recorded is the published objective; without a flag of the objective the default is another.
    common = COMMON if "--regular" in flags else COMMON | {"--jepa_loss_type": "cosine"}
    flags += [part for flag, value in common.items() if flag not in flags for part in (flag, value)]
    for flag in ("--train_file", "--model_name"):
        place = flags.index(flag) + 1
        flags[place] = str(folder / flags[place])
    return ["train", *flags, "--no_cache", "--use_cpu", "--output_dir", str(output)]


def run_case(name: str, folder: Path) -> list[dict[str, float]]:
    """Train a case, with material and run folder in a folder; material that is there is used.

    Returns:
        For each of the first steps the loss, each part of it that was logged, and the norm of the gradient.

    Raises:
        RuntimeError: the run failed; the message has what it said.
    """
    import torch

    from stepjepa.cli import main as stepjepa

    torch.set_num_threads(1)
    output, said = folder / "runs" / name, io.StringIO()
    shutil.rmtree(output, ignore_errors=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        make_material(folder)
        code = stepjepa(command(name, folder, output))
    if code:
        raise RuntimeError(f"{name}: exit code {code}\n{said.getvalue()}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(output)
    return [
        {key: value for key, value in line.items() if key in ("loss", "grad_norm") or key.endswith("_loss")}
        for line in lines
        if "loss" in line
    ][:STEPS]


def main(names: list[str]) -> None:
    """Record cases, all if none is named, and write them down: nine digits, a line for each step."""
    import tokenizers
    import torch
    import transformers

    document: dict[str, Any] = {"cases": {}}
    if names:
        document = json.loads(GOLDEN.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for name in names or CASES:
            steps = run_case(name, Path(folder))
            document["cases"][name] = [{key: float(f"{value:.9g}") for key, value in step.items()} for step in steps]
            print(name, flush=True)
    document["versions"] = {each.__name__: each.__version__ for each in (tokenizers, torch, transformers)}
    text = json.dumps(document, indent=1, sort_keys=True)
    text = re.sub(r"\{[^{}]*\}", lambda step: " ".join(step.group().split()), text)
    GOLDEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
