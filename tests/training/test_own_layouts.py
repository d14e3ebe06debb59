"""A layout of the user's own that leaves a term of the objective without anything is refused before training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa import (
    Alignment,
    Cosine,
    JepaConfig,
    JepaTrainer,
    LMLoss,
    Objective,
    Readout,
    TokenizedRecord,
    TokenSequence,
    main_sequence,
)
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.views.layouts import LAYOUTS, Layout, PlaceFn

NO_LABELS = "layout 'unlabelled': no record has a label, so the LM loss would be 0 in every step; .*gamma 0"
NO_READOUTS = "layout 'unread': no record has a readout, so the loss of its pairs would be 0 in every step; "


def read_alone(record: TokenizedRecord) -> list[TokenSequence]:
    """Source and target of a pair, as sequences without labels."""
    end = len(record.ids) - 1
    return [
        TokenSequence(record.ids[: end // 2], readouts=(Readout(0, "source", end // 2 - 1, end // 2),)),
        TokenSequence(record.ids[:end], readouts=(Readout(0, "target", end - 1, end),)),
    ]


OWN: dict[str, PlaceFn] = {
    "unlabelled": lambda record, predictors, reading: read_alone(record),
    "unread": lambda record, predictors, reading: [main_sequence(record)],
    "half_read": lambda record, predictors, reading: [main_sequence(record), *read_alone(record)[:1]],
}


@pytest.fixture(autouse=True)
def own_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in OWN.items():
        monkeypatch.setitem(LAYOUTS, name, Layout(name, ("llm-jepa", "regular"), place=place))


def make_trainer(folder: Path, tokenizer: Any, config: JepaConfig, **parts: Any) -> JepaTrainer:
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, max_steps=1),
        config,
        processing_class=copy.deepcopy(tokenizer),
        **{"train_dataset": tiny.records(), **parts},
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layout": "unlabelled"}, NO_LABELS),
        ({"layout": "unlabelled", "mode": "regular"}, NO_LABELS),
        ({"layout": "unread"}, NO_READOUTS),
        (
            {"layout": "half_read"},
            "layout 'half_read': expected a source and a target readout of each pair, got one of",
        ),
    ],
)
def test_what_would_train_nothing_is_refused(
    settings: dict[str, Any], words: str, trained_tokenizer: Any, tmp_path: Path
) -> None:
    """The first three trained with a loss of 0 and no word; the last was an error of torch about sizes."""
    config = JepaConfig(**settings)
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, trained_tokenizer, config)
    if settings["layout"] != "half_read":
        with pytest.raises(ValueError, match=words):
            make_trainer(tmp_path, trained_tokenizer, config, train_dataset=None, eval_dataset=tiny.records())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"layout": "unlabelled", "gamma": 0.0}, {}),
        # Some steps have no views, and then the main text is trained.
        ({"layout": "unlabelled", "jepa_ratio": 0.5}, {}),
        ({"layout": "unlabelled"}, {"objective": Objective([Alignment(1.0, Cosine())])}),
        ({"layout": "unread", "mode": "regular"}, {}),
        ({"layout": "unread"}, {"objective": Objective([LMLoss()])}),
    ],
)
def test_what_trains_something_is_trained(
    settings: dict[str, Any], parts: dict[str, Any], trained_tokenizer: Any, tmp_path: Path
) -> None:
    make_trainer(tmp_path, trained_tokenizer, JepaConfig(**settings), **parts).train()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"


def test_the_command_says_it_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    flags = f"--train_file {tmp_path}/data.jsonl --model_name preset:tiny --output_dir {tmp_path}/run --use_cpu"
    assert main(["train", *flags.split(), "--layout", "unlabelled", "--max_steps", "1"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("stepjepa train: error: layout 'unlabelled': no record has a label")
    assert "--gamma 0" in message and not (tmp_path / "run").exists()
