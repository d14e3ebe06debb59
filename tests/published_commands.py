"""The command lines of the published scripts, as data: what users of the field type.

Facts about an interface: flags as the documents write them, shell variables filled in with one of the values written
there, backslashes and launchers left out; of lines that differ by numbers alone one or two. Every line says which
fields it must come to here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Line:
    """One published command line.

    Attributes:
        script: the published program that it starts.
        document: where it is written.
        flags: its flags, as published.
        expected: fields of ``JepaConfig``, or flags of ours, with the values that it must come to.
        implied: what the published program's name says and ours must be told.
    """

    script: str
    document: str
    flags: str
    expected: dict[str, Any] = field(default_factory=dict)
    implied: str = ""

    @property
    def arguments(self) -> list[str]:
        """The flags as a list, those that the program's name implies first."""
        return f"{self.implied} {self.flags}".split()


REGULAR = {"mode": "regular"}
LLAMA = "meta-llama/Llama-3.2-1B-Instruct"


def llm(predictors: int, lbd: float, last_token: int | None, **other: Any) -> dict[str, Any]:
    """What an LLM-JEPA line comes to."""
    same = {"mode": "llm-jepa", "layout": "separate", "jepa_loss_type": "cosine", "gamma": 1.0, "jepa_ratio": 1.0}
    if other.get("jepa_loss_type") == "infonce":
        same["infonce_temperature"] = 0.07
    return {**same, "predictors": predictors, "lbd": lbd, "last_token": last_token, **other}


def step(predictors: int, lbd: float, last_token: int | None = None, **other: Any) -> dict[str, Any]:
    """What a Step-JEPA line comes to."""
    return {**llm(predictors, lbd, last_token, **other), "mode": "step-jepa", "layout": "branched", **other}


# --- LLM-JEPA: finetune.py ----------------------------------------------------------------------------------------
_text = partial(Line, "finetune.py")
_RUN = "--train_file gsm8k_train.jsonl --output_dir=./fine-tuned --num_epochs=4 --finetune_seed=82"
_RUN_END = f"--model_name={LLAMA} --learning_rate=1e-5"
_ONE = f"{_RUN} --last_token=-2 --lbd=0.5 --predictors=1 {_RUN_END}"

RUN_SH = [
    _text("run.sh", f"{_RUN} --regular {_RUN_END}", REGULAR),
    *(
        _text("run.sh", f"{_RUN} --last_token=-2 --lbd=0.5 --predictors={count} {_RUN_END}", llm(count, 0.5, -2))
        for count in (0, 2)
    ),
]

README = [
    _text("README, LoRA", f"{_ONE} --lora --lora_rank 512", llm(1, 0.5, -2, lora_rank=512)),
    _text("README, one pass", f"{_ONE} --additive_mask", llm(1, 0.5, -2)),
    _text(
        "README, pretraining",
        f"{_ONE} --pretrain --plain --trainall",
        llm(1, 0.5, -2, pretrain=True, plain=True, labels="all"),
    ),
    _text("README, pretraining", f"{_RUN} --regular {_RUN_END} --pretrain", {**REGULAR, "pretrain": True}),
    _text("README, after it", f"{_ONE} --plain", llm(1, 0.5, -2, plain=True, labels="assistant")),
    _text("README, ablation", f"{_ONE} --jepa_l2", llm(1, 0.5, -2, jepa_loss_type="l2")),
    _text("README, ablation", f"{_ONE} --jepa_mse", llm(1, 0.5, -2, jepa_loss_type="mse")),
    _text("README, ablation", f"{_ONE} --infonce", llm(1, 0.5, -2, jepa_loss_type="infonce")),
    _text("README, ablation", f"{_ONE} --front_pred", llm(1, 0.5, -2, front_pred=True)),
    _text("README, ablation", f"{_ONE} --reverse_pred", llm(1, 0.5, -2, reverse_pred=True)),
    _text("README, FLOPs", f"{_ONE} --track_flop", llm(1, 0.5, -2, track_flop=True)),
    _text("README, FLOPs", f"{_RUN} --regular {_RUN_END} --track_flop", {**REGULAR, "track_flop": True}),
    _text("README, FLOPs", f"{_ONE} --same_flop", llm(1, 0.5, -2, same_flop=True)),
    _text("README, FLOPs", f"{_ONE} --same_flop --jepa_ratio 0.25", llm(1, 0.5, -2, same_flop=True, jepa_ratio=0.25)),
    _text("README, dropout", f"{_ONE} --jepa_ratio=0.25", llm(1, 0.5, -2, jepa_ratio=0.25)),
]

_EIGHT = "--lora --lora_rank=256 --batch_size=8 --grad_accum=8 --eval_accuracy"
_QWEN = "--model_name=Qwen/Qwen3-8B --learning_rate=4e-5"
_ANSWERED = {"eval_generate": 50, "data_file": "gsm8k_train.jsonl", "train_file": None, "split_seed": 82}
_WHOLE = f"--model_name={LLAMA} --learning_rate=1e-5 --batch_size=8 --grad_accum=8 --eval_accuracy"
_SCRIPT = "--train_file datasets/gsm8k_train.jsonl --output_dir=./fine-tuned-llama1b-jepa --num_epochs=4"

DRIVERS = [
    _text(
        "run_qwen3_8b.sh",
        f"{_RUN} --last_token=-3 --lbd=1.0 --predictors=1 {_QWEN} {_EIGHT} --max_new_tokens_eval=512 "
        "--wandb --wandb_project llm-jepa",
        llm(1, 1.0, -3, **_ANSWERED, eval_max_new_tokens=512, training={"report_to": "wandb"}),
    ),
    _text(
        "scripts/llama1b_jepa_gsm8k.sh",
        f"{_SCRIPT} --finetune_seed=82 --last_token=-2 --lbd=0.5 --predictors=1 {_WHOLE} --eval_accuracy_steps=100 "
        "--wandb --max_eval_samples=50",
        llm(1, 0.5, -2, **{**_ANSWERED, "data_file": "datasets/gsm8k_train.jsonl"}, eval_steps=100),
    ),
    _text(
        "scripts/qwen3_8b_jepa_gsm8k.sh",
        f"{_SCRIPT} --finetune_seed=82 --last_token=-3 --lbd=0.5 --predictors=1 {_QWEN} {_EIGHT} --wandb --no_save",
        llm(1, 0.5, -3, lora_rank=256, training={"report_to": "wandb", "save_strategy": "no"}),
    ),
]

_SINGLE = (
    "--train_file=datasets/gsm8k_train.jsonl --output_dir=./fine-tuned-gsm8k-pred3 "
    f"--model_name={LLAMA} --num_epochs=4 --learning_rate=1e-5 --batch_size=4 --grad_accum=4 --max_length=512 "
    "--finetune_seed=42 --eval_file=datasets/gsm8k_test.jsonl"
)
_SINGLE_JEPA = f"{_SINGLE} --predictors=3 --lbd=0.5 --gamma=1.0 --last_token=-2"

SINGLE_GPU = [
    _text("train_gsm8k_single_gpu.sh", _SINGLE_JEPA, llm(3, 0.5, -2)),
    _text("train_gsm8k_single_gpu.sh", f"{_SINGLE} --regular", REGULAR),
]

# --- LLM-JEPA: large models, and Semantic Tube Prediction ----------------------------------------------------------

_LARGE = "--train_file synth_train.jsonl --eval_file synth_test.jsonl --output_dir=./ft --num_epochs=4"
_LARGE_END = "--model_name=allenai/OLMo-2-1124-7B-Instruct --learning_rate=8e-5"

LARGE = [
    Line("finetune8bh200.py", "run8bh200.sh", f"{_LARGE} --finetune_seed=23 --regular {_LARGE_END}", REGULAR),
    Line(
        "finetune8bh200.py",
        "run8bh200.sh",
        f"{_LARGE} --finetune_seed=23 --last_token=-1 --lbd=2.0 --predictors=4 {_LARGE_END}",
        llm(4, 2.0, -1),
    ),
]

_TUBE = "--train_file synth_train.jsonl --output_dir=ft-j --num_epochs=4 --finetune_seed=82"
_TUBE_END = f"--model_name={LLAMA} --learning_rate=2e-5"

TUBE = [
    Line("stp.py", "run_stp.sh", f"{_TUBE} --regular {_TUBE_END}", {**REGULAR, "stp": 0.0}),
    Line(
        "stp.py",
        "run_stp.sh",
        f"{_TUBE} --last_token=-2 --lbd=0.02 --predictors=0 {_TUBE_END} --linear=random_span",
        {**REGULAR, "stp": 0.02},
    ),
]

TUBE_REFUSED = [
    Line("stp.py", "README, tube", f"{_TUBE} {_TUBE_END} --linear=random_span --linear_predictor"),
    Line("stp.py", "README, tube", f"{_TUBE} {_TUBE_END} --linear=e2e"),
    Line("stp.py", "README, tube", f"{_TUBE} {_TUBE_END} --linear=curvature"),
    Line("stp.py", "README, tube", f"{_TUBE} {_TUBE_END} --random_span_mask --random_span_mask_recover"),
]

# --- Step-JEPA -----------------------------------------------------------------------------------------------------

_STEPS = "--train_file ./gsm8k_step_jepa.jsonl"
_ADAPTED = (
    f"--train_file=./gsm8k_step_jepa.jsonl --output_dir=./checkpoints_adapted --model_name={LLAMA} --num_epochs=3 "
    "--learning_rate=2e-5 --batch_size=4 --grad_accum=4 --max_length=1024"
)
_FULL = f"{_ADAPTED} --finetune_seed=42 --debug=5"
_FULL_STEP = f"{_FULL} --step_jepa --predictors=2 --lbd=0.1 --gamma=1.0 --last_token=-1 --jepa_ratio=-1.0"
_RANK = "--lora --lora_rank=16"
_adapted = partial(Line, "finetune_step_jepa_adapted.py")

ADAPTED = [
    _adapted(
        "train_adapted.sh",
        f"{_ADAPTED} --step_jepa --predictors=2 --lbd=0.1 --gamma=1.0 {_RANK}",
        step(2, 0.1, lora=True),
    ),
    _adapted("train_full_options.sh", f"{_FULL_STEP} {_RANK}", step(2, 0.1, -1)),
    _adapted("train_full_options.sh", f"{_FULL_STEP} --jepa_l2 {_RANK}", step(2, 0.1, -1, jepa_loss_type="l2")),
    _adapted("train_full_options.sh", f"{_FULL_STEP} --jepa_mse {_RANK}", step(2, 0.1, -1, jepa_loss_type="mse")),
    _adapted("train_full_options.sh", f"{_FULL_STEP} --infonce", step(2, 0.1, -1, jepa_loss_type="infonce")),
    _adapted("train_full_options.sh", f"{_FULL} --regular {_RANK}", {**REGULAR, "debug": 5}),
    _adapted(
        "train_full_options.sh",
        f"{_FULL} --step_jepa --predictors=2 --lbd=0.1 --gamma=1.0 --last_token=-2 --jepa_ratio=0.5",
        step(2, 0.1, -2, jepa_ratio=0.5),
    ),
    _adapted(
        "K predictor tokens",
        f"{_STEPS} --step_jepa --predictors 1 --lbd 0.5 --output_dir ./outputs/K1_lbd0.5",
        step(1, 0.5),
    ),
    _adapted(
        "implementation comparison",
        f"{_STEPS} --model_name {LLAMA} --output_dir ./checkpoints_adapted --step_jepa --lora --lbd 0.1",
        step(2, 0.1, lora=True),
    ),
    _adapted("EVALUATION guide", "--step_jepa --predictors 3 --lbd 2.0 --output_dir ./outputs/K3_lbd2.0", step(3, 2.0)),
    _adapted("options guide", f"{_STEPS} --regular --lora", {**REGULAR, "lora": True}),
    _adapted("options guide", f"{_STEPS} --predictors 2 --lbd 0.5 --lora", llm(2, 0.5, None, lora=True)),
    _adapted("options guide", f"{_STEPS} --step_jepa --predictors 2 --lbd 0.1 --lora", step(2, 0.1, lora=True)),
    _adapted("options guide", f"{_STEPS} --step_jepa --gamma 2.0 --debug 7", step(2, 0.1, gamma=2.0)),
]

# The program of its own has no --step_jepa, and one predictor token.
_OWN = f"{_STEPS} --model_name {LLAMA}"
_standalone = partial(Line, "train_step_jepa.py", implied="--step_jepa --predictors 1")

STANDALONE = [
    _standalone(
        "Step-JEPA README",
        f"{_OWN} --output_dir ./checkpoints --lora --lora_rank 16 --lbd 0.1 --gamma 1.0 --jepa_loss_type cosine "
        "--num_epochs 3 --batch_size 4 --grad_accum 4",
        step(1, 0.1),
    ),
    _standalone("QUICKSTART", f"--model_name Qwen/Qwen2.5-Math-1.5B-Instruct {_STEPS}", step(1, 0.1)),
    _standalone("QUICKSTART", f"{_OWN} --output_dir ./checkpoints_full", step(1, 0.1, lora=False)),
    _standalone(
        "QUICKSTART, troubles",
        f"{_OWN} --output_dir ./checkpoints --lbd 0.2 --jepa_loss_type mse --learning_rate 1e-5",
        step(1, 0.2, jepa_loss_type="mse"),
    ),
]

TRAINING = [*RUN_SH, *README, *DRIVERS, *SINGLE_GPU, *LARGE, *TUBE, *ADAPTED, *STANDALONE]
