"""Model cards: valid for a hub, true, and with nothing in them that a reader's program obeys."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

import tiny
from made_up_runs import evaluate, make_run
from stepjepa.cli import main
from stepjepa.evaluation.output import model_fingerprint
from stepjepa.files import write_jsonl
from stepjepa.training.card import (
    CARD_FILE,
    MARK,
    base_on_hub,
    model_card,
    renew_card,
    results_of,
    summaries,
    write_card,
)

RUN: dict[str, Any] = {
    "model": "org/base-1B",
    "model_fingerprint": "c0ffee" * 6 + "cafe",
    "arguments": [
        *("--train_file", "/home/me/secret project/train.jsonl", "--model_name", "org/base-1B", "--step_jepa"),
        *("--hub_model_id=me/x", "--report_to", "wandb", "mlflow", "--fsdp_config", '{"a": "/opt/me/b.json"}'),
    ],
    "jepa": {"mode": "step-jepa", "layout": "branched", "predictors": 3, "lbd": 0.7},
    "data": {"train": {"file": "train.jsonl", "records": 17, "sha256": "ab" * 32}},
    "counts": {"records": 17, "pairs": 13, "skipped": 0},
    "tokens": {"all": 1100, "main": 1000, "ratio": 1.1},
    "lora": None,
    "results": {"steps": 5, "tokens": 1234.0, "eval_lm_loss": 2.5, "last_log": {"lm_loss": 2.25, "jepa_loss": 0.5}},
    "versions": {"stepjepa": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11"},
}

SUMMARY: dict[str, Any] = {
    "n": 7,
    "test_file": "/home/me/test.jsonl",
    "task": "generic",
    "headline": "exact",
    "scores": {"exact": {"mean": 3 / 7, "low": 0.158, "high": 0.75}, "judge": {"mean": 0.5, "low": None, "high": None}},
    "gold_loss": 1.5,
    "settings": {"temperature": 0.0, "max_new_tokens": 256},
}


def head(card: ModelCard) -> dict[str, Any]:
    """The YAML before the text, as anybody reads it."""
    value = yaml.safe_load(str(card).split("---\n")[1])
    assert isinstance(value, dict)
    return value


def test_what_a_card_says() -> None:
    card = model_card(RUN, "me/mine", scores=[SUMMARY])
    assert head(card) == {
        "base_model": "org/base-1B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["stepjepa", "jepa", "step-jepa"],
    }
    text = str(card)
    assert f"| `train` | `train.jsonl` | 17 | `{'ab' * 32}` |" in text
    assert "As trained on: 17 records, 13 pairs, 1100 tokens, 1.10 of plain fine-tuning's." in text
    assert "| `predictors` | `3` |" in text
    assert "After 5 steps and 1,234 tokens:" in text
    assert "| `lm_loss` | 2.2500 | 2.5000 |" in text
    assert "7 examples of `test.jsonl`, task `generic`, greedy, at most 256 new tokens:" in text
    assert "| `exact` (headline) | 0.4286 | 0.1580 to 0.7500 |" in text
    assert "| `judge` | 0.5000 |  |" in text
    assert "name = 'me/mine'" in text
    assert "<|predictor_1|>" in text
    assert "<|predictor_1|>" not in str(model_card(RUN, "me/mine", predictors=False))


def test_a_card_tells_nothing_of_the_machine() -> None:
    text = str(model_card(RUN, "me/mine", scores=[SUMMARY]))
    assert "--train_file train.jsonl" in text
    for word in ("/home", "/opt", "secret", "wandb", "hub_model_id", "mlflow"):
        assert word not in text, word
    assert '"b.json"' in text


def test_regular_training_has_no_jepa_in_its_card() -> None:
    card = model_card({**RUN, "jepa": {"mode": "regular", "lbd": 0.1, "labels": "all"}}, "run")
    assert head(card)["tags"] == ["stepjepa"]
    assert "`lbd`" not in str(card)
    assert "plain fine-tuning" in str(card)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "org/base-1B"),
        ({"model": "gpt2"}, "gpt2"),
        ({"model": "preset:tiny"}, None),
        ({"loaded": {"pretrain": True}}, None),
        ({"model": "models/base", "model_fingerprint": "ab" * 32}, None),
        ({"model": "/srv/models/base"}, None),
        ({"model": "x]\nlicense: mit"}, None),
        ({"model": None}, None),
    ],
)
def test_only_a_model_of_the_hub_is_named_as_the_base(changes: dict[str, Any], expected: str | None) -> None:
    assert base_on_hub({**RUN, **changes}) == expected
    assert head(model_card({**RUN, **changes}, "run")).get("base_model") == expected


def test_hostile_names_stay_text() -> None:
    evil = "`|\n---\nlicense: mit\n---\n```\n<script>alert(1)</script>\x1b[2J"
    hostile = {
        **RUN,
        "model": evil,
        "arguments": ["--train_file", evil],
        "jepa": {"mode": evil, "layout": evil},
        "data": {evil: {"file": evil, "records": 1, "sha256": evil}},
        "counts": {evil: 3},
        "versions": {"torch": evil},
    }
    summary = {**SUMMARY, "task": evil, "test_file": evil, "scores": {evil: SUMMARY["scores"]["exact"]}}
    card = model_card(hostile, evil, scores=[summary])
    assert set(head(card)) == {"library_name", "pipeline_tag", "tags"}
    text = str(card)
    assert "\x1b" not in text
    outside = text.split("---\n", 2)[2]
    code = False
    for line in outside.splitlines():
        assert not line.startswith("---")
        if line.startswith("```"):
            code = not code
        elif not code and "<script>" in line:
            # Within inline code no reader takes it for HTML: an odd number of backticks before it.
            assert line.partition("<script>")[0].count("`") % 2 == 1, line
    assert not code


def test_somebodys_own_card_is_kept(tmp_path: Path) -> None:
    card = model_card(RUN, "run")
    write_card(tmp_path, card)
    write_card(tmp_path, card)
    own = (tmp_path / "README.md").read_text(encoding="utf-8").replace(MARK, "My words.")
    (tmp_path / "README.md").write_text(own, encoding="utf-8")
    write_card(tmp_path, card)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == own


def test_scores_are_those_of_the_very_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = {"model": model_fingerprint(tmp_path)}
    (tmp_path / "a.summary.json").write_text(json.dumps({**SUMMARY, "settings": settings}), encoding="utf-8")
    (tmp_path / "b.summary.json").write_text(json.dumps({**SUMMARY, "settings": {"model": "x"}}), encoding="utf-8")
    (tmp_path / "c.summary.json").write_text("[]", encoding="utf-8")
    (tmp_path / "d.summary.json").write_text("{", encoding="utf-8")
    assert [found["settings"] for found in summaries(tmp_path)] == [settings]


@pytest.mark.parametrize("flags", [[], ["--lora", "--lora_rank", "3"]], ids=["whole", "adapter"])
def test_the_lines_of_a_card_load_the_model(flags: list[str], plain_tokenizer: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    # No spare rows: an adapter's base must be made larger by whoever loads it.
    tiny.make_model("llama", vocab_size=len(plain_tokenizer)).save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    fixed = ["--model_name", str(tmp_path / "base"), "--train_file", str(tmp_path / "data.jsonl"), "--use_cpu"]
    assert main(["train", *fixed, "--max_steps", "1", "--output_dir", str(tmp_path / "run"), *flags]) == 0
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert yaml.safe_load(text.split("---\n")[1])["library_name"] == ("peft" if flags else "transformers")
        assert MARK in text
    text = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(text.partition("```python\n")[2].partition("```")[0], found)
    ids = found["tokenizer"]("3+4 <|predictor_1|>", return_tensors="pt").input_ids
    assert ids.max() == len(plain_tokenizer)
    with torch.no_grad():
        assert torch.isfinite(found["model"](ids).logits).all()


def test_a_new_evaluation_is_in_the_card(tmp_path: Path, plain_tokenizer: Any) -> None:
    folder = make_run(tmp_path / "run", "1011000")
    plain_tokenizer.save_pretrained(folder)
    evaluate(folder, "1011000")
    renew_card(folder)
    assert "0.4286" in (folder / CARD_FILE).read_text()
    # Of another model now, so it says nothing of this one; and somebody's own card stays.
    (folder / "model.safetensors").write_text("other")
    before = (folder / CARD_FILE).read_text()
    renew_card(folder)
    assert (folder / CARD_FILE).read_text() == before
    (folder / CARD_FILE).write_text("# Mine\n")
    evaluate(folder, "1111111")
    renew_card(folder)
    assert (folder / CARD_FILE).read_text() == "# Mine\n"
    renew_card(tmp_path)
    assert not (tmp_path / CARD_FILE).exists()
    # A card that somebody has begun to fill in is theirs, too.
    (folder / CARD_FILE).write_text("# Mine\n[More Information Needed]\n")
    renew_card(folder)
    assert "# Mine" in (folder / CARD_FILE).read_text()


def test_a_card_has_the_name_that_it_is_uploaded_under(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "1011000")
    for file in folder.glob("*.summary.json"):
        file.unlink()
    renew_card(folder)
    assert not (folder / CARD_FILE).exists()
    renew_card(folder, "me/mine")
    assert "name = 'me/mine'" in (folder / CARD_FILE).read_text()


def test_a_checkpoint_has_results_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    history = [{"lm_loss": 2.5, "step": 2, "num_tokens": 70}, {"eval_lm_loss": 3.5, "step": 3}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": history}))
    found = results_of(folder)
    assert found is not None
    assert (found["steps"], found["tokens"], found["lm_loss"], found["eval_lm_loss"]) == (3, 70, 2.5, 3.5)
    assert "After 3 steps and 70 tokens:" in str(model_card(RUN, "me/mine", results=found))
    assert results_of(tmp_path) is None
