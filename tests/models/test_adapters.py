"""A PEFT model that a user brings trains and saves the embedding rows of the predictor tokens."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from stepjepa import JepaConfig, JepaTrainer, load_model
from stepjepa.chat.predictors import all_predictor_ids
from stepjepa.models.token_rows import grow

RECORDS = [
    {
        "messages": [
            {"role": "user", "content": f"count to {n}"},
            {"role": "assistant", "content": " ".join("abcde"[:n])},
        ]
    }
    for n in (1, 2, 3, 4, 5)
]

ADAPTERS = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    "dora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True),
    "adalora": peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
}


def trainer(folder: Path, adapter: peft.PeftConfig) -> JepaTrainer:
    texts = [message["content"] for record in RECORDS for message in record["messages"]]
    model, tokenizer = load_model("preset:tiny", texts=texts)
    model.save_pretrained(folder / "base")
    args = TrainingArguments(
        str(folder / "run"),
        max_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    wrapped = peft.get_peft_model(model, adapter)
    return JepaTrainer(wrapped, args, JepaConfig(predictors=2), train_dataset=RECORDS, processing_class=tokenizer)


@pytest.mark.parametrize("name", ADAPTERS)
def test_rows_of_predictors_are_trained_and_saved(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # PEFT warns of a tied head beside an embedding that is saved whole.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        run = trainer(tmp_path, ADAPTERS[name])
        ids = torch.tensor(all_predictor_ids(run.processing_class))
        before = run.model.get_input_embeddings()(ids).detach().clone()
        run.train()
        after = run.model.get_input_embeddings()(ids).detach()
        assert ((after - before).abs().amax(1) > 1e-3).all()
        run.save_model(str(tmp_path / "adapter"))
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        grow(base, len(run.processing_class))
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(loaded.get_input_embeddings()(ids), after)


def test_adapter_that_can_train_no_rows_is_refused(tmp_path: Path) -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="an adapter of type PROMPT_TUNING can't train the rows of new tokens"):
        trainer(tmp_path, prompt)
