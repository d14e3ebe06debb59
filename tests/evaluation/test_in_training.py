"""Answers while a model trains: right sums, nothing disturbed, the best checkpoint kept."""

import copy
import json

import pytest
import torch
from transformers import TrainingArguments

import tiny
from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.cli import main
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.evaluation.in_training import COUNT, AnswerScores, spread
from stepjepa.files import write_jsonl
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.tasks.generic import GenericTask
from stepjepa.training.trainer import JepaTrainer
from user_task import LastWord


def make_scores(tokenizer, records=None, task=None):
    return AnswerScores(records or tiny.records(), task or GenericTask(), tokenizer, max_new_tokens=5, batch_size=2)


def test_shares_of_several_processes_add_up_to_the_whole(tiny_tokenizer):
    model = tiny.make_model("llama").eval()
    records = tiny.records()
    scores = make_scores(tiny_tokenizer)
    whole = scores(model, 0, 1)
    assert whole[COUNT] == len(records)
    # More processes than records too: the last ones have nothing and still name every score.
    for world in (2, 3, len(records) + 2):
        parts = [scores(model, rank, world) for rank in range(world)]
        assert all(list(part) == list(whole) for part in parts)
        assert {name: sum(part[name] for part in parts) for name in whole} == pytest.approx(whole)


def test_a_record_without_a_truth_is_refused_at_once(tiny_tokenizer):
    class Picky(LastWord):
        def truth(self, record):
            raise UserError("none", path=record.path, line=record.line)

    with pytest.raises(UserError, match="none"):
        make_scores(tiny_tokenizer, task=Picky())


@pytest.mark.parametrize(("size", "count", "picked"), [(10, 4, [0, 2, 5, 7]), (3, 9, [0, 1, 2]), (7, 1, [0])])
def test_records_are_taken_from_all_over_a_file(size, count, picked):
    assert spread(list(range(size)), count) == picked


@pytest.mark.parametrize("lora", [False, True])
def test_training_is_not_disturbed_and_the_scores_are_logged(lora, tiny_tokenizer, tmp_path):
    weights = {}
    for answers in (False, True):
        model = tiny.make_model("llama")
        if lora:
            torch.manual_seed(0)
            model = add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer)[:2])
        base = model.get_base_model() if lora else model
        own = base.generation_config
        tokenizer = copy.deepcopy(tiny_tokenizer)
        trainer = JepaTrainer(
            model,
            TrainingArguments(
                str(tmp_path),
                max_steps=3,
                eval_strategy="steps",
                eval_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                learning_rate=0.01,
            ),
            JepaConfig(mode="step-jepa", predictors=2),
            train_dataset=tiny.records(),
            eval_dataset=tiny.records(),
            processing_class=tokenizer,
            answer_scores=make_scores(tokenizer) if answers else None,
        )
        trainer.train()
        assert base.generation_config is own
        logged = [line for line in trainer.state.log_history if "eval_lm_loss" in line]
        assert len(logged) == 3
        assert all(("eval_answer_exact" in line) == answers for line in logged)
        weights[answers] = {name: value.clone() for name, value in model.state_dict().items()}
        expected = make_scores(tokenizer)(model.eval(), 0, 1)
        if answers:
            assert logged[-1]["eval_answer_contains"] == expected["contains"] / expected[COUNT]
            assert logged[-1]["eval_answer_stopped"] == expected["stopped"] / expected[COUNT]
    assert all(torch.equal(weights[False][name], value) for name, value in weights[True].items())


@pytest.fixture
def files(tmp_path):
    chats = [[("user", f"Say {word} now, please"), ("assistant", word)] for word in ("one", "two", "three", "one")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    write_jsonl(tmp_path / "data.jsonl", rows)
    return tmp_path


def train(files, *flags):
    given = ["--train_file", files / "data.jsonl", "--eval_file", files / "data.jsonl", "--model_name", "preset:tiny"]
    given += ["--output_dir", files / "run", "--regular", "--use_cpu", "--batch_size", "4", "--grad_accum", "1"]
    return main(["train", *map(str, given), *flags])


def test_the_checkpoint_that_answers_best_is_kept(files, capsys):
    flags = ["--eval_generate", "3", "--eval_max_new_tokens", "4", "--max_steps", "6", "--learning_rate", "3e-3"]
    flags += ["--eval_steps", "2", "--save_strategy", "best", "--metric_for_best_model", "answer_prefix"]
    assert train(files, *flags, "--load_best_model_at_end", "--eval_task", "generic", "--save_steps", "2") == 0
    printed = capsys.readouterr().out
    assert "answers: to 3 records at every evaluation, task generic" in printed
    assert "prefix: " in printed
    metrics = [json.loads(line) for line in (files / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = {line["step"]: line["eval_answer_prefix"] for line in metrics if "eval_answer_prefix" in line}
    assert set(scores) == {2, 4, 6}
    best = next(step for step in (2, 4, 6) if scores[step] == max(scores.values()))
    assert {folder.name for folder in (files / "run").glob("checkpoint-*")} >= {f"checkpoint-{best}"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval_task", "generic"], "--eval_task does nothing without --eval_generate"),
        (["--eval_generate", "2", "--eval_task", "generik"], "--eval_task: no task 'generik'; did you mean 'generic'?"),
        (["--eval_generate", "2", "--eval_task", "boxed"], "or pass --eval_task generic"),
        (["--eval_generate", "2", "--eval_max_new_tokens", "5000"], "positions; lower --eval_max_new_tokens or remove"),
        (["--eval_generate", "2", "--eval_task", "generic", "--spider_path", "db"], "does nothing with task 'generic'"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, files, capsys):
    assert train(files, *flags) == 2
    *notes, error = capsys.readouterr().err.splitlines()
    assert words in error
    # Of the held-out records, which are those of the training here.
    assert all(note.startswith("note: 4 of 4 held-out records") for note in notes)
    assert not (files / "run").exists()


@pytest.mark.parametrize("trained_with", ["Say it.", None])
def test_a_training_model_is_asked_as_the_trained_one_will_be(trained_with, files, monkeypatch):
    """Under the system prompt of the training file, though the held-out one has another."""
    texts = {"train": trained_with, "held": "Please."}
    for name, system in texts.items():
        first = [{"role": "system", "content": system}] if system else []
        rest = [{"role": "user", "content": "Which word?"}, {"role": "assistant", "content": "this"}]
        write_jsonl(files / f"{name}.jsonl", [{"messages": [*first, *rest]}] * 4)
    seen = []

    class Watching(AnswerScores):
        def __init__(self, records, *args, **options):
            seen.extend(record.messages[0]["content"] for record in records)
            super().__init__(records, *args, **options)

    monkeypatch.setattr("stepjepa.training.run.AnswerScores", Watching)
    flags = ["--train_file", str(files / "train.jsonl"), "--eval_file", str(files / "held.jsonl"), "--max_steps", "1"]
    assert train(files, *flags, "--eval_generate", "2", "--eval_max_new_tokens", "2", "--save_strategy", "no") == 0
    assert seen == [trained_with or "Which word?"] * 2
