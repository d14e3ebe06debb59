"""Flags of the objective: each sets what it says, and what makes no sense is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import parse
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.option import options_of

TWO_TERMS = ({"term": "a:B", "args": {}}, {"term": "c:D", "args": {"x": 2}})

FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("", {"mode": "llm-jepa", "layout": "separate", "predictors": 1, "jepa_loss_type": "cosine", "lbd": 0.1}),
    # No other flag changes the default loss.
    *((f"--{flag}", {"jepa_loss_type": "cosine"}) for flag in ("lbd 0.1", "gamma 1", "predictors 1")),
    ("--mode regular", {"mode": "regular", "predictors": 0}),
    ("--last_token -1", {"last_token": -1, "jepa_loss_type": "cosine"}),
    ("--regular", {"mode": "regular", "predictors": 0}),
    ("--step_jepa", {"mode": "step-jepa", "layout": "branched", "predictors": 2, "jepa_loss_type": "cosine"}),
    ("--layout branched", {"layout": "branched"}),
    ("--predictors 0", {"predictors": 0}),
    ("--jepa_l2", {"jepa_loss_type": "l2"}),
    ("--jepa_mse", {"jepa_loss_type": "mse"}),
    # The published flag keeps the published temperature.
    ("--infonce", {"jepa_loss_type": "infonce", "infonce_temperature": 0.07}),
    ("--infonce --infonce_temperature 0.1", {"jepa_loss_type": "infonce", "infonce_temperature": 0.1}),
    ("--jepa_loss_type infonce --infonce_temperature 0.2", {"jepa_loss_type": "infonce", "infonce_temperature": 0.2}),
    (
        "--jepa_loss_type infonce --infonce_negatives all",
        {"jepa_loss_type": "infonce", "infonce_negatives": "all"},
    ),
    ("--jepa_ratio=-1.0", {"jepa_ratio": 1.0}),
    ("--step_jepa --pair_distance 2", {"pair_distance": 2}),
    ("--step_jepa --step_separator line", {"step_separator": "line"}),
    ("--target_grad ema --ema_decay 0.5", {"target_grad": "ema", "ema_decay": 0.5}),
    ("--lbd_schedule warmup --lbd_warmup 0.3", {"lbd_schedule": "warmup", "lbd_warmup": 0.3}),
    ("--stp", {"stp": 0.02}),
    ("--regular --stp 0.3", {"mode": "regular", "stp": 0.3}),
    ("--trainall", {"labels": "all"}),
    ("--plain --train_all", {"plain": True, "labels": "all"}),
    ("--additive_mask", {}),
    ("--step_jepa --steps_from reasoning", {"steps_from": "reasoning"}),
    ('--chat_template_kwargs {"enable_thinking":false}', {"chat_template_kwargs": {"enable_thinking": False}}),
    ("--over_length drop", {"over_length": "skip"}),
    ("--share_prefixes false", {"share_prefixes": False}),
    ("--term a:B", {"terms": ({"term": "a:B", "args": {}},)}),
    ('--term a:B c:D --term_args {} {"x":2}', {"terms": TWO_TERMS}),
]
OWN = {name for _, wanted in FLAGS for name in wanted}
NUMBERS = {"last_token": -2, "jepa_layer": 1, "max_length": 700, "row_length": 700}
# Every other field: its flag with another value than the default.
for each in options_of(JepaConfig):
    if each.name not in OWN:
        other = [choice for choice in each.choices if choice != each.default]
        value = True if each.type is bool else other[0] if other else NUMBERS.get(each.name, 0.25)
        FLAGS.append((f"--{each.name} {value}".removesuffix(" True"), {each.name: value}))


def parsed(flags: str) -> JepaConfig:
    args = parse("train", ["--train_file", "t", "--model_name", "m", "--output_dir", "o", *flags.split()])
    config: JepaConfig = args.run.jepa
    return config


@pytest.mark.parametrize(("flags", "wanted"), FLAGS, ids=[flags or "none" for flags, _ in FLAGS])
def test_a_flag_sets_what_it_says_and_nothing_else(flags: str, wanted: dict[str, Any]) -> None:
    result, plain = parsed(flags).to_dict(), parsed("").to_dict()
    for name, value in wanted.items():
        assert result.pop(name) == value, name
        del plain[name]
    if "mode" not in wanted and "--step_jepa" not in flags:
        assert result == plain


REFUSED: list[tuple[str, str]] = [
    ("--regular --predictor_head linear", "--regular has no views, so --predictor_head does nothing"),
    ("--regular --infonce", "--regular has no views, so the alignment loss 'infonce'"),
    ("--ema_decay 0.9", "--ema_decay does nothing without --target_grad ema"),
    ("--target_grad ema --ema_decay 1", "--ema_decay: expected 0 or more and less than 1, got 1.0"),
    ("--pair_distance 2", "pair_distance 2 counts steps, and mode llm-jepa has none"),
    (
        "--step_jepa --layout inplace --pairs all --pair_distance 2",
        "pairs 'all' with pair_distance 2 overlap",
    ),
    ("--pooling mean --last_token -2", "last_token contradicts pooling 'mean'; leave one out"),
    ("--plain --train_all --step_jepa", "plain with labels 'all' trains the user's text alone"),
    ("--train_all --labels assistant", "--train_all means --labels all, and --labels assistant is named too"),
    ("--infonce_temperature 0.2", "--infonce_temperature does nothing without --jepa_loss_type infonce"),
    ("--jepa_layer 0", "reads the embedding of a predictor token, always the same"),
    ("--infonce --batch_size 1", "a batch of 1 has one; raise --batch_size"),
    ("--infonce --batch_size 1 --pairs all", "a batch of 1 has one; raise --batch_size"),
    ("--regular --gamma 0", "no step has a loss whose weight is above 0, so nothing would be trained; raise --gamma"),
    ("--gamma 0 --jepa_ratio 0 --jepa_loss_type l2", "nothing would be trained; raise --gamma"),
    ("--seed=-1", "--finetune_seed: expected 0 to 2**32 - 1, got -1"),
    ("--eval_split 0.5", "--eval_split does nothing without --data_file"),
    ("--plain --chat_template x", "--plain and --chat_template exclude each other"),
    ("--dataloader_drop_last true", "dataloader_drop_last: not with this trainer, got True; leave it out"),
    ("--num_epochs 0", "--num_epochs: expected a number above 0, got 0.0"),
    ("--num_epochs inf", "--num_epochs: expected a number above 0, got inf"),
    ("--eval_steps 0", "--eval_steps: expected 1 or more, got 0"),
    ("--lora --lora_alpha 0", "--lora_alpha: expected 1 or more, got 0"),
    ("--max_steps 0", "max_steps: expected 1 or more, or -1 for num_train_epochs, got 0"),
    ("--torch_compile", "torch_compile: this trainer can't be compiled"),
    ("--jepa_layer 7", "jepa_layer: expected -5 to 4 for a model of 4 layers, got 7"),
    ("--pretrain --lora", "--lora needs trained weights"),
    ("--lora --load_in_4bit --load_in_8bit --model_name x", "exclude each other"),
    ("--same_flop --max_steps 5", "--same_flop works out the number of steps"),
    ("--term_args {}", "--term_args: expected a JSON object for each --term"),
    ("--term own_term:Nothing", "--term"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 5])
    return tmp_path / "data.jsonl"


def command(data: Path, folder: Path, flags: str) -> list[str]:
    fixed = ["--train_file", str(data), "--output_dir", str(folder), "--use_cpu", "--max_length", "128"]
    named = [] if "--model_name" in flags else ["--model_name", "preset:tiny"]
    return ["train", *fixed, *named, *flags.split()]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_makes_no_sense_is_refused(flags: str, words: str, data: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(command(data, tmp_path / "run", flags)) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_flags_that_change_nothing_say_so(data: Path, tmp_path: Path, capsys: Any) -> None:
    parsed("--additive_mask")
    assert "--additive_mask changes nothing" in capsys.readouterr().err
    parsed("--step_jepa --last_token -2")
    assert "--last_token -2 is followed here" in capsys.readouterr().err
    parsed("--step_separator line")
    assert "--step_separator has no effect without --step_jepa" in capsys.readouterr().err
    parsed("--step_jepa --step_separator line")
    assert "--step_separator" not in capsys.readouterr().err
    parsed("--regular --predictors 3 --lbd 2")
    assert "--predictors, --lbd have no effect" in capsys.readouterr().err
