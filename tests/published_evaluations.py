"""The command lines of the published evaluations, as data; see ``published_commands``."""

from __future__ import annotations

from typing import Any

from published_commands import LLAMA, Line

_TESTED = "--model_name=./fine-tuned --input_file=gsm8k_test.jsonl --output_file=eval.jsonl --split_tune_untune"
_DRIVEN = f"{_TESTED} --original_model_name={LLAMA} --nosplit_data --spider_path=spider_data/database"
_ONE_DEVICE = (
    f"--model_name=./fine-tuned-llama1b-jepa --original_model_name={LLAMA} --nosplit_data --device_map=cuda:0 "
)
_STEP_MODEL = "--model_path ./checkpoints_adapted"
_STEP_TEST = "--test_file ../datasets/gsm8k_test.jsonl"


def _evaluated(document: str, flags: str, **expected: Any) -> Line:
    return Line("evaluate.py", document, flags, expected)


def _step_evaluated(document: str, flags: str, **expected: Any) -> Line:
    return Line("evaluate_step_jepa.py", document, flags, expected)


EVALUATION = [
    _evaluated("run.sh", _DRIVEN, model_path="./fine-tuned", test_file="gsm8k_test.jsonl"),
    _evaluated("run_stp.sh", f"{_DRIVEN} --max_new_tokens=-1"),
    _evaluated(
        "scripts/llama1b_jepa_gsm8k.sh",
        f"{_ONE_DEVICE} --input_file=datasets/gsm8k_test.jsonl --output_file=eval_llama1b_jepa.jsonl",
        output_file="eval_llama1b_jepa.jsonl",
    ),
    _evaluated(
        "scripts/llama1b_jepa_synth.sh",
        f"{_ONE_DEVICE} --input_file=datasets/synth_test.jsonl --output_file=eval.jsonl --split_tune_untune",
        similarity=None,
    ),
    _evaluated(
        "README, after pretraining", f"{_TESTED} --nosplit_data --plain --statswith", plain=True, startswith=True
    ),
    _evaluated("evaluate.py", f"{_DRIVEN} --startswith", startswith=True),
    _evaluated(
        "QUICKSTART",
        f"--model_path ./checkpoints {_STEP_TEST} --output_file results.jsonl",
        output_file="results.jsonl",
    ),
    _step_evaluated(
        "EVALUATION guide, evaluate.sh",
        f"{_STEP_MODEL} {_STEP_TEST} --output_file ./evaluation_results.jsonl --max_new_tokens 512 --temperature 0.0",
        max_new_tokens=512,
        temperature=0.0,
    ),
    _step_evaluated(
        "EVALUATION guide",
        f"{_STEP_MODEL} {_STEP_TEST} --max_examples 100 --output_file ./quick_eval.jsonl",
        max_examples=100,
    ),
    _step_evaluated(
        "EVALUATION guide", f"{_STEP_MODEL} --temperature 0.7 --output_file ./eval_sampling.jsonl", temperature=0.7
    ),
    _step_evaluated(
        "EVALUATION guide", "--model_path ./checkpoints_full --no_lora --output_file ./eval_full_model.jsonl"
    ),
    _step_evaluated(
        "EVALUATION guide",
        f"{_STEP_MODEL} --use_test_prompts --output_file ./eval_original_prompts.jsonl",
        use_test_prompts=True,
    ),
    _step_evaluated("EVALUATION guide", "--model_path ./checkpoints_k1 --output_file ./eval_k1.jsonl"),
]
