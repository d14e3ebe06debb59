"""Scores of answers and of retrieval on held-out records during training, and the metric of the best model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepjepa.base.counting import counted
from stepjepa.base.errors import raising_user_errors
from stepjepa.base.settings_in_text import renaming_settings
from stepjepa.config.run import RunConfig
from stepjepa.data.record import Record
from stepjepa.data.summarising import system_prompts
from stepjepa.evaluation.answering import AnswerScores, spread
from stepjepa.evaluation.retrieval_scores import RetrievalScores
from stepjepa.objectives.objective import Objective
from stepjepa.store.prompts import common_system_prompt, with_system_prompt
from stepjepa.tasks.base import Task, TaskOptions
from stepjepa.tasks.registry import choose_records, choose_task
from stepjepa.training.metric_checks import check_best_metric

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments


def held_out_scores(
    config: RunConfig,
    eval_records: Sequence[Record],
    train_records: Sequence[Record],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[AnswerScores | None, RetrievalScores | None, dict[str, str]]:
    """Make the objects that score answers and retrieval at every evaluation.

    Args:
        config: of the run.
        eval_records: held-out records.
        train_records: their system prompt, if all have the same one, is put in front of the questions.
        model: the trained model.
        tokenizer: that of the model.

    Returns:
        The two objects, None for one that the configuration does not ask for; and their rows of the first screen.

    Raises:
        UserError: the task can't score the records, or a prompt with its answer is too long.
    """
    scores, retrieval, rows = None, None, dict[str, str]()
    if config.eval_generate is None and not config.eval_retrieval:
        return scores, retrieval, rows
    with renaming_settings(_names_here(config)):
        task, records = _held_out_questions(config, eval_records, train_records)
        if config.eval_generate is not None:
            scores = _answer_scores(config, task, records, tokenizer)
            scores.batcher(model)
            rows["answers"] = f"to {counted(len(scores.records), 'record')} at every evaluation, task {task.name}"
        if config.eval_retrieval:
            retrieval = RetrievalScores(records, task)
            answers = f"the answers of {counted(len(records), 'record')}"
            rows["retrieval"] = f"of {answers} at every evaluation, task {task.name}"
    return scores, retrieval, rows


def _names_here(config: RunConfig) -> dict[str, str]:
    """Return the settings of ``stepjepa evaluate`` that errors of shared code name -> those of a run."""
    held_out = "eval_file" if config.data_file is None else "data_file"
    return {"task": "eval_task", "max_new_tokens": "eval_max_new_tokens", "test_file": held_out}


def _held_out_questions(
    config: RunConfig, records: Sequence[Record], trained: Sequence[Record]
) -> tuple[Task, list[Record]]:
    """Return the task of the held-out records, and those that it can score, prompted as in ``stepjepa evaluate``."""
    task = choose_task(config.eval_task, records, TaskOptions(config.spider_path, config.missing_databases))
    answerable = list(choose_records(task, records).evaluated.values())
    prompt = common_system_prompt(system_prompts(trained))
    return task, answerable if prompt is None else with_system_prompt(answerable, prompt)


def _answer_scores(
    config: RunConfig, task: Task, records: list[Record], tokenizer: PreTrainedTokenizerBase
) -> AnswerScores:
    """Return the object that answers and scores some held-out records during training."""
    return AnswerScores(
        spread(records, config.eval_generate or 0),
        task,
        tokenizer,
        max_new_tokens=config.eval_max_new_tokens,
        batch_size=config.batch_size,
        plain=config.jepa.plain,
    )


def check_metric(run: RunConfig, training: TrainingArguments, objective: Objective | None = None) -> None:
    """Raise ``UserError`` for a ``metric_for_best_model`` that no evaluation of a run measures, before data are read.

    Args:
        run: the configuration.
        training: the Trainer's arguments of it.
        objective: terms that were passed instead of those of the configuration.
    """
    # The scores of a task, and whether the model is a mixture of experts, are known later: any name of them is accepted
    # here, and ``JepaTrainer`` checks it.
    scores = {"answer": run.eval_generate, "retrieval": run.eval_retrieval or None, "router": True}
    with raising_user_errors():
        check_best_metric(training, (objective or Objective.from_config(run.jepa)).metrics, scores)
