"""Golden figures of training: the loss parts and gradient norms of the first steps of small runs of many kinds.

``python tests/golden/record.py [CASE ...]`` trains the cases and writes ``golden.json`` beside itself. Only what people
use is driven, the command line and ``metrics.jsonl``, so that the figures outlive any rewrite of what is behind.
Records, tokenizer and weights are made here and by ``tests/tiny.py``, so that they do not change with the package.

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
sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 5
SEED = 7

# -- records, tokenizer, models ----------------------------------------------------------------------------------------


def records(kind: str) -> list[dict[str, Any]]:
    """64 records of ``chat``, of ``steps`` (every ninth has one alone) or of ``views``, which most of them name.

    Every third chat has a system message, and every eighth a turn before.
    """
    result = []
    for index in range(64):
        numbers = [1 + (index * 5 + place * 7) % 13 for place in range(3 + index % 3)]
        name, thing = ("Ada", "Bo", "Cy", "Dee")[index % 4], ("apples", "books", "pens")[index % 3]
        steps = [f"{sum(numbers[:at])} + {numbers[at]} = {sum(numbers[: at + 1])}." for at in range(1, len(numbers))]
        steps = [*steps[: 0 if index % 9 == 4 else None], f"{name} has {sum(numbers)} {thing}."]
        answer = "\n\n".join(steps) if kind == "steps" else steps[-1]
        texts = [("system", "You add numbers.")] if index % 3 == 0 else []
        texts += [("user", f"Who is {name}?"), ("assistant", "A friend.")] if index % 8 == 5 and kind != "steps" else []
        texts += [("user", f"{name} gets {', '.join(map(str, numbers))} {thing}. How many?"), ("assistant", answer)]
        record: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in texts]}
        if kind == "views" and index % 7 != 3:
            record |= {"text": f"Sum of task {index}: {thing}.", "code": f"add({index}, {index % 5})"}
        result.append(record)
    return result


def make_tokenizer() -> Any:
    """Bytes, and merges that are written down: a full stop and the blank line behind it are one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    merges = [("Ċ", "Ċ"), (".", "ĊĊ"), ("Ġ", "h"), ("Ġh", "a"), ("Ġha", "s"), ("u", "s"), ("us", "e"), ("use", "r")]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[2],
        extra_special_tokens=[special[1]],
        chat_template="{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        clean_up_tokenization_spaces=False,
    )


def make_material(folder: Path) -> None:
    """Write the records, and every model with its tokenizer, into a folder that has none of them yet."""
    if (folder / "chat.jsonl").exists():
        return
    for kind in ("steps", "views", "chat"):
        text = "".join(json.dumps(record) + "\n" for record in records(kind))
        (folder / f"{kind}.jsonl").write_text(text, encoding="utf-8")
    tokenizer = make_tokenizer()
    for name in ("llama", "gpt2", "gemma3_window", "mamba", "lfm2"):
        # The last has no row for a predictor token and must grow.
        shape: dict[str, Any] = {"vocab_size": len(tokenizer)} if name == "lfm2" else {}
        if name == "gpt2":
            shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tiny.make_model(name, seed=SEED, **shape).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


# -- cases -------------------------------------------------------------------------------------------------------------

_CHAT = ["--train_file", "chat.jsonl"]
_STEPS = ["--train_file", "steps.jsonl", "--step_jepa"]
_DISTINCT = ["--jepa_loss_type", "infonce", "--lbd", "0.02"]
_INFONCE = [*_DISTINCT, "--infonce_negatives", "all"]
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
    "step_branched_truncate": [*_STEPS, "--over_length", "truncate", "--max_length", "108"],
    "step_branched_skip": [*_STEPS, "--over_length", "skip", "--max_length", "117"],
    "step_branched_pair_distance": [*_STEPS, "--pair_distance", "2"],
    "step_branched_pooling_mean": [*_STEPS, "--pooling", "mean"],
    "step_inplace": _INPLACE,
    # Distances, other terms, weights.
    "mse": [*_STEPS, "--jepa_loss_type", "mse"],
    "infonce": [*_STEPS, *_INFONCE],
    "infonce_uneven": [*_STEPS, *_INFONCE, *_UNEVEN],
    "infonce_distinct": [*_STEPS, *_DISTINCT],
    "sigreg_accumulated": [*_STEPS, "--sigreg", "0.05", "--batch_size", "4", "--grad_accum", "2"],
    "variance_covariance": [*_STEPS, "--variance", "1", "--covariance", "0.04"],
    # Some gradients are so small here that rounding decides Adam's step, unless its epsilon is larger.
    "gamma": [*_STEPS, "--gamma", "0.5", "--lbd", "0.5", "--adam_epsilon", "1e-4"],
    "target_ema": [*_STEPS, "--target_grad", "ema", "--ema_decay", "0.8"],
    "jepa_ratio": [*_STEPS, "--jepa_ratio", "0.5"],
    "lbd_cosine": [*_STEPS, "--lbd_schedule", "cosine", "--max_steps", "20"],
    "head_mlp": [*_STEPS, "--predictor_head", "mlp"],
    "jepa_layer": [*_STEPS, "--jepa_layer", "1"],
    "lora": [*_STEPS, "--lora", "--lora_rank", "4"],
    "gradient_checkpointing": [*_STEPS, "--gradient_checkpointing"],
    # Other models; the last two have layers that run as rows.
    "gpt2": [*_STEPS, "--model_name", "gpt2"],
    "gemma3_inplace": [*_INPLACE, "--model_name", "gemma3_window"],
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

    from stepjepa.cli.main import main as stepjepa

    torch.set_num_threads(1)
    output, printed = folder / "runs" / name, io.StringIO()
    shutil.rmtree(output, ignore_errors=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        make_material(folder)
        code = stepjepa(command(name, folder, output))
    if code:
        raise RuntimeError(f"{name}: exit code {code}\n{printed.getvalue()}")
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
