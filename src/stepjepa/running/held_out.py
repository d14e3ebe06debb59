"""Scores of answers and of retrieval on held-out records, at every evaluation during training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError
from stepjepa.config.run import RunConfig
from stepjepa.data.records import Record
from stepjepa.data.summarising import system_prompts
from stepjepa.evaluation.answering import AnswerScores, spread
from stepjepa.evaluation.held_out import RetrievalScores
from stepjepa.store.prompts import common_system_prompt, with_system_prompt
from stepjepa.tasks.base import Task, TaskOptions
from stepjepa.tasks.registry import choose_task, keep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    try:
        task, records = _held_out_questions(config, eval_records, train_records)
        if config.eval_generate is not None:
            scores = _answer_scores(config, task, records, tokenizer)
            scores.check(model)
            rows["answers"] = f"to {len(scores.records):,} records at every evaluation, task {task.name}"
        if config.eval_retrieval:
            retrieval = RetrievalScores(records, task)
            rows["retrieval"] = f"of the answers of {len(records):,} records at every evaluation, task {task.name}"
    except UserError as error:
        # The message names settings of 'stepjepa evaluate', which have other names in a run.
        raise UserError(re.sub(r"(`|\A(?=\w+: ))(task|max_new_tokens)\b", r"\1eval_\2", str(error))) from None
    return scores, retrieval, rows


def _held_out_questions(
    config: RunConfig, records: Sequence[Record], trained: Sequence[Record]
) -> tuple[Task, list[Record]]:
    """Return the task of the held-out records, and those that it can score, prompted as in ``stepjepa evaluate``."""
    task = choose_task(config.eval_task, records, TaskOptions(config.spider_path, config.missing_databases))
    answerable = list(keep(task, records)[0].values())
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
