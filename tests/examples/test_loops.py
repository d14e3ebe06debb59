"""The loops of ``examples/loops`` give the losses of ``JepaTrainer``, and load without this package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ranks import run_script
from stepjepa import JepaConfig, JepaLoss, JepaTrainer, load_model
from stepjepa.base.files import write_jsonl
from tiny import arguments, make_record

LOOPS = Path(__file__).resolve().parents[2] / "examples" / "loops"
STEPS = 10


@pytest.fixture(scope="module")
def records() -> list[Any]:
    return [make_record("", f"What is {i} and {i * 7 % 5}?", f"That is {i + i * 7 % 5}.", line=i) for i in range(1, 24)]


@pytest.fixture(scope="module")
def losses(records: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of JepaTrainer."""
    texts = [message["content"] for record in records for message in record.messages]
    model, tokenizer = load_model("preset:tiny", texts=texts)
    options = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    args = arguments(tmp_path_factory.mktemp("run"), max_steps=STEPS, per_device_train_batch_size=8, **options)
    config = JepaConfig(jepa_loss_type="infonce")
    trainer = JepaTrainer(model, args, config, train_dataset=records, processing_class=tokenizer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# TRL's own settings name an option of transformers by its old name.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", ["plain_pytorch", "in_accelerate", "in_trl", "in_lightning"])
def test_a_loop_gives_the_losses_of_the_trainer(
    name: str, records: list[Any], losses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(LOOPS))
    loop, loop_arguments = importlib.import_module(name), importlib.import_module("loop_arguments")
    result = loop.train(loop_arguments.LoopArguments(records, "preset:tiny", STEPS, tmp_path / "model", shuffle=False))
    assert result == pytest.approx(losses, abs=1e-5)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) <= model.get_input_embeddings().num_embeddings


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_without_pairs_the_loss_is_that_of_trl(records: list[Any], tmp_path: Path) -> None:
    """On prompt and completion. Behind the last turn TRL would train a line end, too, if the template wrote one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [message["content"] for record in records for message in record.messages]
    model, tokenizer = load_model("preset:tiny", texts=texts)
    # Line ends between the turns, and none behind the last one.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '' if loop.first else '\n' }}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% endfor %}{{ '\n<|im_start|>assistant\n' if add_generation_prompt }}"
    )
    jepa = JepaLoss(model, tokenizer, JepaConfig(mode="regular"))
    own = jepa(model, jepa.collate(records[:8])).loss.item()
    rows = [dict(zip(("prompt", "completion"), ([m] for m in record.messages), strict=True)) for record in records[:8]]
    options = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 8, "save_strategy": "no"}
    settings = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train_file", "nowhere.jsonl"], "error: nowhere.jsonl: no such data file; check the path"),
        (["--train_file", "data.jsonl", "--model_name", "nowhere"], "error: can't load a tokenizer from 'nowhere'"),
        (["--train_file", "data.jsonl", "--steps", "0"], "error: --steps: expected 1 or more, got 0"),
    ],
)
def test_wrong_input_is_one_line(
    flags: list[str],
    words: str,
    records: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(LOOPS))
    monkeypatch.chdir(tmp_path)
    loop, loop_arguments = importlib.import_module("plain_pytorch"), importlib.import_module("loop_arguments")
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in records])
    monkeypatch.setattr(sys, "argv", ["plain_pytorch.py", *flags, "--output_dir", "model"])
    with pytest.raises(SystemExit) as ended:
        loop_arguments.run(loop.train, loop.__doc__)
    assert words in f"{ended.value.code}\n{capsys.readouterr().err}"


TWO = """
import sys, in_accelerate, loop_arguments
in_accelerate.BATCH_SIZE = 4
args = loop_arguments.read_arguments("")
args.shuffle = False
in_accelerate.train(args)
"""


@pytest.mark.slow
def test_two_processes_of_accelerate_train_what_one_trains(
    records: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(LOOPS))
    loop, loop_arguments = importlib.import_module("in_accelerate"), importlib.import_module("loop_arguments")
    whole = records[:16]  # no batch of the epoch is uneven
    loop.train(loop_arguments.LoopArguments(whole, "preset:tiny", 3, tmp_path / "one", shuffle=False))

    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in whole])
    (tmp_path / "two.py").write_text(TWO, encoding="utf-8")
    flags = ["--train_file", tmp_path / "data.jsonl", "--steps", "3", "--output_dir", tmp_path / "two"]
    run_script(tmp_path / "two.py", flags, tmp_path / "log")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        # Adam takes the sign of a rounding error for a gradient; a wrong one moves weights by 1e-3 a step.
        assert (value - two[name]).abs().max() <= 1e-4, name
