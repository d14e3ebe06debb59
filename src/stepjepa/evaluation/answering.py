"""Answer records with a model and score the answers, one line per record; also during training."""

from __future__ import annotations

import collections.abc
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol, TypeAlias

from stepjepa.base.errors import UserError, naming_batch_size
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.content import opens_thought
from stepjepa.data.records import Record
from stepjepa.evaluation.prompts import Example, make_examples
from stepjepa.models.sampling import Answer, Sampling, Span
from stepjepa.tasks.base import WRONG, Likelihood, Response, Scored, Task, record_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stepjepa.models.generation import Generator

RAN_ON = "ran on"
COUNT = "answers"  # the name under which AnswerScores returns the number of records


@dataclass(frozen=True, slots=True)
class Question:
    """A record that is answered."""

    index: int  # position in the test file, from 0
    record: Record
    prompt: str | None = None  # as text; None if another program rendered it
    # Of the task's continuations, by label; None if there are none or another program answered.
    likelihoods: Mapping[str, Likelihood] | None = None


def judge(
    task: Task, questions: Sequence[Question], answers: Sequence[Sequence[Answer]], headline: str | None = None
) -> list[JsonObject]:
    """Score answers, equally many samples for each question, into one line per question.

    ``headline`` is the score that decides what is an error, by default that of the task; UserError if it has none such.

    A line has ``index``, ``prompt``, ``truth``, ``generated``, ``extracted``, ``scores``, ``error``, ``stopped``,
    ``new_tokens`` and, if there are any, ``likelihoods``. With several samples ``scores`` are their means, beside
    ``pass@1`` (the mean of the headline), ``pass@n`` (one sample is right) and ``majority`` (the majority answer is
    right); ``generated``, ``extracted`` and ``error`` are those of the majority answer, ``samples`` holds all of them.
    """
    flat = [(question, answer) for question, given in zip(questions, answers, strict=True) for answer in given]
    responses = [Response(answer.text, each.likelihoods, opens_thought(each.prompt)) for each, answer in flat]
    verdicts = task.score_all([question.record for question, _ in flat], responses)
    name = headline or task.headline
    if missing := next((scored.scores for scored in verdicts if name not in scored.scores), None):
        hint = "; leave --startswith out" if name == task.beginning != task.headline else ""
        raise UserError(f"task '{task.name}' has no score '{name}', only {', '.join(missing)}{hint}")
    judged = iter(zip(verdicts, responses, strict=True))
    lines = []
    for question, given in zip(questions, answers, strict=True):
        samples, votes = [], []
        for answer in given:
            scored, response = next(judged)
            # Where likelihoods decide, a text that was cut off is not the reason of an error.
            samples.append(_sample(answer, scored, name, by_text=question.likelihoods is None))
            votes.append(task.vote(scored, response) if len(given) > 1 else None)
        truth = task.truth(question.record)
        line: JsonObject = {"index": question.index, "prompt": question.prompt, "truth": truth}
        line |= samples[0] if len(samples) == 1 else _combine(samples, votes, name)
        if question.likelihoods is not None:
            line["likelihoods"] = {label: list(found) for label, found in question.likelihoods.items()}
        lines.append(line)
    return lines


def _sample(answer: Answer, scored: Scored, headline: str, *, by_text: bool) -> JsonObject:
    reason = RAN_ON if by_text and answer.stopped is False else scored.error or WRONG
    return {
        "generated": answer.text,
        "extracted": scored.extracted,
        "scores": scored.scores,
        "error": None if scored.scores[headline] else reason,
        "stopped": answer.stopped,
        "new_tokens": answer.new_tokens,
    }


def _combine(samples: Sequence[JsonObject], votes: Sequence[str | None], headline: str) -> JsonObject:
    # The majority answer is the first sample with the most frequent vote; of equally frequent ones the first counts.
    counts = Counter(vote for vote in votes if vote is not None)
    chosen = samples[votes.index(counts.most_common(1)[0][0]) if counts else 0]
    right = [sample["scores"][headline] for sample in samples]
    scores = {name: fmean(sample["scores"][name] for sample in samples) for name in chosen["scores"]}
    scores |= {"pass@1": fmean(right), f"pass@{len(samples)}": any(right), "majority": chosen["scores"][headline]}
    stopped, tokens = ([sample[name] for sample in samples] for name in ("stopped", "new_tokens"))
    return {
        **chosen,
        "scores": scores,
        "stopped": None if None in stopped else fmean(stopped),
        "new_tokens": None if None in tokens else sum(tokens),
        "samples": list(samples),
    }


LineBatches: TypeAlias = "collections.abc.Generator[list[JsonObject], None, None]"
"""Scored lines, some at a time; to be closed by whoever stops early."""


class Engine(Protocol):
    """Answers the records of an evaluation and scores the answers: :class:`Batcher`, or ``server.ServerEngine``."""

    def answer_missing(self, done: Container[int]) -> LineBatches:
        """Yield the scored lines of the records whose index is not in ``done``, as they are finished.

        ``done`` may grow meanwhile by the lines that were yielded. Lines are those of :func:`judge` with ``gold_loss``,
        the LM loss per token of the right answer (None without likelihoods), and ``gold_tokens``.
        """
        ...


@dataclass
class Batcher:
    """The built-in engine: generates answers with a transformers model, batch by batch, and scores them.

    ``examples`` are the tokenised records, longest prompts first, so that the first batch needs the most memory.
    UserError if a record can't be rendered, or has more tokens than the model has positions.
    """

    task: Task
    records: Mapping[int, Record]
    generator: Generator
    _: KW_ONLY
    batch_size: int
    headline: str | None = None  # the score that decides what is an error; by default that of the task

    def __post_init__(self) -> None:
        tokenizer, template = self.generator.tokenizer, self.generator.template
        self.examples = make_examples(self.records.items(), tokenizer, template, self.task.continuations)
        positions, new = self.generator.positions or math.inf, self.generator.sampling.max_new_tokens
        for example in self.examples:
            spans = example.gold, *example.continuations.values()
            longest = max(len(example.prompt_ids) + new, *(len(span.ids) for span in spans))
            if longest > positions:
                told = f"prompt and answer (of {new} new tokens at most) have {longest} tokens, the model {positions}"
                remedy = "positions; lower --max_new_tokens or remove the record"
                raise record_error(self.records[example.index], f"{told} {remedy}")
        self.examples.sort(key=lambda example: (-len(example.prompt_ids), example.index))

    def answer_missing(self, done: Container[int]) -> LineBatches:
        """Yield the missing lines of each batch; see :class:`Engine`."""
        for number, start in enumerate(range(0, len(self.examples), self.batch_size)):
            # A batch with missing lines is run as a whole, since its padding affects the last bits of the results.
            batch = self.examples[start : start + self.batch_size]
            missing = {example.index for example in batch if example.index not in done}
            if missing:
                with naming_batch_size(self.batch_size):
                    lines = self.lines(batch, number)
                yield [line for line in lines if line["index"] in missing]

    def lines(self, batch: Sequence[Example], number: int) -> list[JsonObject]:
        """The scored lines of a batch of ``examples``, whose number seeds sampling; UserError if a loss is not finite.

        They are the lines of :func:`judge` with ``gold_loss``, the LM loss per token of the right answer, and
        ``gold_tokens``.
        """
        # Computed first: sampling from logits that overflow fails without naming the record.
        gold = self._log_probabilities([example.gold for example in batch])
        for example, value in zip(batch, gold, strict=True):
            if not math.isfinite(value):
                message = f"the model's loss on this record is {-value}; its numbers overflow: try --dtype float32"
                raise record_error(self.records[example.index], message)
        answers = self.generator.answer([example.prompt_ids for example in batch], number)
        questions = [
            Question(each.index, self.records[each.index], each.prompt, self._likelihoods(each)) for each in batch
        ]
        lines = judge(self.task, questions, answers, self.headline)
        for line, example, value in zip(lines, batch, gold, strict=True):
            line |= {"gold_loss": -value / example.gold.tokens, "gold_tokens": example.gold.tokens}
        return lines

    def _likelihoods(self, example: Example) -> dict[str, Likelihood] | None:
        values = self._log_probabilities(list(example.continuations.values()))
        found = zip(example.continuations.items(), values, strict=True)
        return {label: Likelihood(value, span.tokens) for (label, span), value in found} or None

    def _log_probabilities(self, spans: Sequence[Span]) -> list[float]:
        size = self.batch_size
        parts = [spans[start : start + size] for start in range(0, len(spans), size)]
        return [value for part in parts for value in self.generator.log_probabilities(part)]


def spread(records: Sequence[Record], count: int) -> list[Record]:
    """At most ``count`` records at even distances, since a file may be sorted by label."""
    count = min(count, len(records))
    return [records[at * len(records) // count] for at in range(count)]


@dataclass
class AnswerScores:
    """Lets a model answer held-out records, all of which the task can score, greedily while it trains."""

    records: Sequence[Record]
    task: Task
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    max_new_tokens: int
    batch_size: int
    plain: bool = False

    def check(self, model: PreTrainedModel) -> Batcher:
        """Prepare the records; ``UserError`` if one with its answer is longer than the model's positions."""
        from stepjepa.models.generation import Generator

        generator = Generator(model, self.tokenizer, Sampling(self.max_new_tokens), plain=self.plain)
        return Batcher(self.task, dict(enumerate(self.records)), generator, batch_size=self.batch_size)

    def __call__(self, model: PreTrainedModel, rank: int, world: int) -> dict[str, float]:
        """Sums of the scores, of ``stopped`` and of :data:`COUNT` over the records of process ``rank`` of ``world``.

        The names are the same in every process.
        """
        batcher = self.check(model)
        # A process without records scores the first one to learn the names, and counts it as 0.
        share = batcher.examples[rank::world]
        sums: Counter[str] = Counter()
        for number, start in enumerate(range(0, max(len(share), 1), self.batch_size)):
            batch = share[start : start + self.batch_size] or batcher.examples[:1]
            for line in batcher.lines(batch, number):
                found = {**line["scores"], "stopped": line["stopped"], COUNT: 1}
                sums.update({name: float(value) if share else 0.0 for name, value in found.items()})
        return dict(sums)

    def close(self) -> None:
        """End the processes of the task."""
        self.task.close()
