"""``JepaTrainer.create_model_card`` joins Trainer's draft with the card of the run, and loses nobody's words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi

import tiny
from fake_hub import FakeHub
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.store.hub import MARK
from stepjepa.training.draft_card import DRAFTED

OF_RUN = ("in mode `step-jepa`, by stepjepa", "AutoModelForCausalLM.from_pretrained(name)")
OF_DRAFT = ("### Training hyperparameters", "- learning_rate: 5e-05", "- Loss: ", "### Framework versions", DRAFTED)


def make_trainer(folder: Path, tokenizer: Any, **more: Any) -> JepaTrainer:
    return JepaTrainer(
        tiny.make_model("llama", vocab_size=len(tokenizer)),
        tiny.arguments(folder, **{"max_steps": 1, "save_strategy": "steps", **more}),
        JepaConfig(mode="step-jepa"),
        train_dataset=tiny.records(),
        eval_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
    )


def head_of(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text.split("---")[1]))


def test_a_draft_keeps_what_is_known_of_the_run(trained_tokenizer: Any, tmp_path: Path) -> None:
    """The lines that load the model, its mode and its tags were lost."""
    trainer, tags = make_trainer(tmp_path, trained_tokenizer, eval_strategy="steps", eval_steps=1), ["mine"]
    trainer.train()
    assert MARK in (tmp_path / "README.md").read_text()
    trainer.create_model_card(license="mit", tags=tags, dataset_name="me/sums")
    text = (tmp_path / "README.md").read_text()
    assert all(words in text for words in (*OF_RUN, *OF_DRAFT, "It was trained on the me/sums dataset."))
    head = head_of(text)
    assert (head["license"], head["datasets"], head["pipeline_tag"]) == ("mit", ["me/sums"], "text-generation")
    assert head["tags"] == ["stepjepa", "jepa", "step-jepa", "mine", "generated_from_trainer"] and tags == ["mine"]
    # A save replaces cards of its own alone, and another draft keeps what was named for this one.
    trainer.train()
    assert (tmp_path / "README.md").read_text() == text
    trainer.create_model_card(model_name="Sums")
    text = (tmp_path / "README.md").read_text()
    assert "# Sums\n" in text and text.count("stepjepa") > 1 and all(words in text for words in OF_RUN)
    assert head_of(text) == {**head, "model_name": "Sums", "model-index": [{"name": "Sums", "results": []}]}


def test_a_card_that_somebody_wrote_keeps_its_text(trained_tokenizer: Any, tmp_path: Path) -> None:
    """It was replaced by the draft."""
    card = b"---\r\nlicense: apache-2.0\r\ntags: sums\r\n---\r\n# Mine\r\n\r\nMy words.\r\n"
    (tmp_path / "README.md").write_bytes(card)
    trainer = make_trainer(tmp_path, trained_tokenizer)
    trainer.create_model_card()
    assert (tmp_path / "README.md").read_bytes() == card
    trainer.create_model_card(license="mit", tags="more")
    text = (tmp_path / "README.md").read_bytes().decode()
    assert text.endswith("---\r\n# Mine\r\n\r\nMy words.\r\n")
    assert head_of(text) == {"license": "mit", "tags": ["sums", "more"]}
    (tmp_path / "README.md").write_text("---\n- a list\n---\n# Mine\n")
    with pytest.raises(UserError, match=r"README.md: its metadata can't be read \(.*\); mend or move it"):
        trainer.create_model_card(license="mit")
    assert "a list" in (tmp_path / "README.md").read_text()


def test_an_untrained_model_has_a_card_that_says_what_it_is(trained_tokenizer: Any, tmp_path: Path) -> None:
    make_trainer(tmp_path, trained_tokenizer).create_model_card(finetuned_from="org/base", language="en")
    text = (tmp_path / "README.md").read_text()
    assert OF_RUN[0] in text and DRAFTED in text
    assert (head_of(text)["base_model"], head_of(text)["language"]) == ("org/base", "en")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        make_trainer(tmp_path, trained_tokenizer).create_model_card(colour="red")


def test_an_upload_has_the_joined_card(trained_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, uploaded = make_trainer(tmp_path, trained_tokenizer, hub_model_id="me/mine"), list[str]()
    trainer.train()
    with FakeHub() as hub:
        hub.serve(monkeypatch)
        # Trainer uploads with options of its own.
        monkeypatch.setattr(HfApi, "upload_folder", lambda _api, **options: uploaded.append(options["folder_path"]))
        trainer.push_to_hub(dataset_name="me/sums", license="mit")
    (folder,) = uploaded
    card = (Path(folder) / "README.md").read_text()
    assert all(words in card for words in (*OF_RUN, "name = 'me/mine'", "# mine\n"))
    assert str(tmp_path) not in card
