"""Flags of the objective: each sets what it says, and what makes no sense is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from stepjepa.arguments import jepa_config
from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.sequences import Sequence
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.cli import main
from stepjepa.commands import parse
from stepjepa.config import JepaConfig
from stepjepa.files import write_jsonl

TWO_TERMS = ({"term": "a:B", "args": {}}, {"term": "c:D", "args": {"x": 2}})

FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("", {"mode": "llm-jepa", "layout": "separate", "predictors": 1, "jepa_loss_type": "infonce", "lbd": 0.1}),
    # A flag of the published command lines, which name no loss, means the published loss.
    ("--lbd 0.1", {"lbd": 0.1, "jepa_loss_type": "cosine"}),
    ("--gamma 1", {"gamma": 1.0, "jepa_loss_type": "cosine"}),
    ("--predictors 1", {"predictors": 1, "jepa_loss_type": "cosine"}),
    ("--last_token -1", {"last_token": -1, "jepa_loss_type": "cosine"}),
    ("--regular", {"mode": "regular", "predictors": 0}),
    ("--step_jepa", {"mode": "step-jepa", "layout": "branched", "predictors": 2, "jepa_loss_type": "infonce"}),
    ("--layout branched", {"layout": "branched", "jepa_loss_type": "infonce"}),
    ("--predictors 10", {"predictors": 10}),
    ("--predictors 0", {"predictors": 0}),
    ("--lbd 2", {"lbd": 2.0}),
    ("--gamma 0.5", {"gamma": 0.5}),
    ("--jepa_l2", {"jepa_loss_type": "l2"}),
    ("--jepa_mse", {"jepa_loss_type": "mse"}),
    ("--infonce", {"jepa_loss_type": "infonce", "infonce_temperature": 0.07}),
    ("--jepa_loss_type infonce --infonce_temperature 0.2", {"jepa_loss_type": "infonce", "infonce_temperature": 0.2}),
    ("--jepa_ratio 0.25", {"jepa_ratio": 0.25}),
    ("--jepa_ratio=-1.0", {"jepa_ratio": 1.0}),
    ("--front_pred", {"front_pred": True}),
    ("--reverse_pred", {"reverse_pred": True}),
    ("--last_token -2", {"last_token": -2}),
    ("--step_jepa --pairs all", {"pairs": "all"}),
    ("--step_jepa --pair_distance 2", {"pair_distance": 2}),
    ("--pooling mean", {"pooling": "mean"}),
    ("--jepa_layer 1", {"jepa_layer": 1}),
    ("--predictor_head mlp", {"predictor_head": "mlp"}),
    ("--target_grad stop", {"target_grad": "stop"}),
    ("--target_grad ema", {"target_grad": "ema", "ema_decay": 0.99}),
    ("--target_grad ema --ema_decay 0.5", {"target_grad": "ema", "ema_decay": 0.5}),
    ("--lbd_schedule cosine", {"lbd_schedule": "cosine"}),
    ("--lbd_schedule warmup", {"lbd_schedule": "warmup", "lbd_warmup": 0.1}),
    ("--lbd_schedule warmup --lbd_warmup 0.3", {"lbd_schedule": "warmup", "lbd_warmup": 0.3}),
    ("--stp", {"stp": 0.02}),
    ("--stp 0.3", {"stp": 0.3}),
    ("--regular --stp 0.3", {"mode": "regular", "stp": 0.3}),
    ("--sigreg 0.05", {"sigreg": 0.05}),
    ("--variance 1 --covariance 0.04", {"variance": 1.0, "covariance": 0.04}),
    ("--train_all", {"labels": "all"}),
    ("--trainall", {"labels": "all"}),
    ("--labels reference", {"labels": "reference"}),
    ("--plain", {"plain": True, "labels": "assistant"}),
    ("--plain --train_all", {"plain": True, "labels": "all"}),
    ("--additive_mask", {}),
    ("--step_separator line", {"step_separator": "line"}),
    ("--encoding rows", {"encoding": "rows"}),
    ("--encoding forest", {"encoding": "tree"}),
    ("--prompt_loss_weight 0.3", {"prompt_loss_weight": 0.3}),
    ("--row_length 700", {"row_length": 700}),
    ("--share_prefixes false", {"share_prefixes": False}),
    ("--term a:B", {"terms": ({"term": "a:B", "args": {}},)}),
    ('--term a:B c:D --term_args {} {"x":2}', {"terms": TWO_TERMS}),
]


def parsed(flags: str) -> JepaConfig:
    return jepa_config(parse("train", ["--model_name", "m", "--output_dir", "o", *flags.split()]))


@pytest.mark.parametrize(("flags", "wanted"), FLAGS, ids=[flags or "none" for flags, _ in FLAGS])
def test_a_flag_sets_what_it_says_and_nothing_else(flags: str, wanted: dict[str, Any]) -> None:
    found, plain = parsed(flags).to_dict(), parsed("").to_dict()
    if "jepa_loss_type" not in wanted:  # which loss each flag means stands in the first rows
        plain["jepa_loss_type"] = found["jepa_loss_type"]
    for name, value in wanted.items():
        assert found.pop(name) == value, name
        del plain[name]
    if "mode" not in wanted and "--step_jepa" not in flags:
        assert found == plain


def test_every_field_of_the_objective_has_a_flag() -> None:
    set_by = {name for _, wanted in FLAGS for name in wanted} | {"max_length", "over_length", "require_pairs"}
    assert set(JepaConfig().to_dict()) == set_by


REFUSED: list[tuple[str, str]] = [
    ("--regular --predictor_head linear", "--regular has no views, so --predictor_head does nothing"),
    ("--regular --pooling mean", "--regular has no views, so --pooling"),
    ("--regular --sigreg 0.1", "--regular has no views, so --sigreg"),
    ("--regular --infonce", "--regular has no views, so the alignment loss 'infonce'"),
    ("--ema_decay 0.9", "--ema_decay does nothing without --target_grad ema"),
    ("--target_grad ema --ema_decay 1", "--ema_decay: expected 0 or more and less than 1, got 1.0"),
    ("--lbd_warmup 0.2", "--lbd_warmup does nothing without --lbd_schedule warmup"),
    ("--lbd_schedule warmup --lbd_warmup 0", "--lbd_warmup: expected a share above 0"),
    ("--pair_distance 2", "pair_distance 2 counts steps, and mode llm-jepa has none"),
    ("--step_jepa --pair_distance 0", "--pair_distance: expected 1 or more, got 0"),
    (
        "--step_jepa --layout inplace --pairs all --pair_distance 2",
        "pairs 'all' with pair_distance 2 overlap",
    ),
    ("--pooling mean --last_token -2", "last_token names one token, and pooling 'mean' averages"),
    ("--plain --train_all --step_jepa", "plain with labels 'all' trains the user's text alone"),
    ("--train_all --labels assistant", "--train_all means --labels all, and --labels assistant is named too"),
    ("--infonce_temperature 0.2", "--infonce_temperature does nothing without --jepa_loss_type infonce"),
    ("--jepa_layer 0", "reads the token embedding of a predictor, always the same"),
    ("--lbd inf", "--lbd: expected 0 or more, got inf"),
    ("--infonce --batch_size 1", "a batch size of 1 has one; raise --batch_size"),
    ("--seed=-1", "--finetune_seed: expected a whole number from 0 to"),
    ("--eval_split 0.5", "--eval_split does nothing without --data_file"),
    ("--plain --chat_template x", "--plain and --chat_template exclude each other"),
    ("--average_tokens_across_devices false", "average_tokens_across_devices: has no effect with this trainer"),
    ("--jepa_layer 7", "jepa_layer: expected -5 to 4 for a model of 4 layers, got 7"),
    ("--pretrain --lora", "--lora needs trained weights"),
    ("--lora --load_in_4bit --load_in_8bit --model_name x", "exclude each other"),
    ("--load_in_4bit", "--load_in_4bit does nothing without --lora"),
    ("--model_name x --train_tokenizer 400", "--train_tokenizer needs random weights"),
    ("--same_flop --max_steps 5", "--same_flop works out the number of steps"),
    ("--layout inplace", "layout 'inplace' does not exist for mode llm-jepa; choose separate or branched"),
    ("--layout sideways", "layout 'sideways' does not exist for mode llm-jepa"),
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
    parsed("--regular --predictors 3 --lbd 2")
    assert "--predictors, --lbd have no effect" in capsys.readouterr().err


def test_an_exported_model_is_asked_as_it_was_trained(data: Path, tmp_path: Path, capsys: Any) -> None:
    flags = "--plain --max_steps 1 --save_strategy no"
    assert main(command(data, tmp_path / "run", flags)) == 0
    assert main(["export", "--model_path", str(tmp_path / "run"), "--output_dir", str(tmp_path / "out")]) == 0
    asked = ["--test_file", str(data), "--output_file", str(tmp_path / "said.jsonl"), "--max_new_tokens", "3"]
    assert main(["evaluate", "--model_path", str(tmp_path / "out"), *asked]) == 0
    assert "trained without a chat format" in capsys.readouterr().out


def sequences(tokenizer: Any, config: JepaConfig) -> list[Sequence]:
    """What the first record becomes."""
    made = RecordTokenizer(tokenizer, config)
    return Collator.of(config, made.predictors.tolist()).sequences(Item(made.tokenize(tiny.records())[0]))


def test_pair_distance_by_hand(trained_tokenizer: Any) -> None:
    record = tiny.records()[0]

    def pairs(**options: Any) -> list[tuple[str, ...]]:
        made = RecordTokenizer(trained_tokenizer, JepaConfig(mode="step-jepa", **options))
        found = made.pairs(record, made.template.render(record.messages))
        return [tuple(view.text.text[view.start : view.end] for view in pair) for pair in found]

    first, second, third, fourth = "3+4=7.\n\n", "7+5=12\n\n", "So it is\n\n", "12"
    assert pairs() == [(first, second)]
    assert pairs(pair_distance=2) == [(first, third)]
    assert pairs(pair_distance=2, pairs="all") == [(first, third), (second, fourth)]
    assert pairs(pair_distance=3, pairs="all") == [(first, fourth)]
    assert pairs(pair_distance=4, pairs="all") == []


def test_a_distant_pair_in_place(trained_tokenizer: Any) -> None:
    """The step between the two is ordinary text, the distant one sees only itself."""
    config = JepaConfig(mode="step-jepa", layout="inplace", pair_distance=2)
    (found,) = sequences(trained_tokenizer, config)
    assert found.start is not None
    names = trained_tokenizer.convert_ids_to_tokens(found.ids.tolist())
    predictors = [place for place, name in enumerate(names) if name.startswith("<|predictor_")]
    (first,) = set(found.start[found.start > 0].tolist())
    alone = np.flatnonzero(found.start)
    assert predictors[-1] < first == alone[0]
    assert len(alone) == alone[-1] + 1 - first
    assert trained_tokenizer.decode(found.ids[predictors[-1] + 1 : first]) == "7+5=12\n\n"
    assert trained_tokenizer.decode(found.ids[alone]) == "So it is\n\n"
