"""Tokenised evaluation inputs: prompt, right answer and continuations of each record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.content import content_part
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.served import difference, served_prompt
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.tokens import TextTokenizer
from stepjepa.chat.unused import parts_without_use
from stepjepa.data.record import Record
from stepjepa.models.sampling import Span
from stepjepa.tasks.answers import composed
from stepjepa.tasks.base import Continuation, record_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Template = ChatTemplate | PlainTemplate

_COMPARED = 32  # records whose prompts are held against those of plain transformers


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised record."""

    index: int  # position in the test file, from 0
    prompt: str
    prompt_ids: list[int]
    gold: Span  # prompt, right answer and end of turn; the last two are scored
    continuations: dict[str, Span]  # of the task, by label; each after the prompt or after a context of its own


def make_examples(
    records: Iterable[tuple[int, Record]],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    continuations: Callable[[Record], Sequence[Continuation]] = lambda record: (),
) -> list[Example]:
    """Tokenise the last turn of records, and the continuations of each, as in training.

    UserError if the template can't render one.

    Args:
        records: pairs of index and record.
        tokenizer: that of the model.
        template: its chat template, or the plain format.
        continuations: function from a record to the texts whose likelihood is measured behind its prompt.
    """
    texts, examples = TextTokenizer(tokenizer), []
    for index, record in records:
        try:
            turn = template.last_turn(*record.chat)
            scored = {
                continuation.label: _continuation_span(record, continuation, texts, template)
                for continuation in continuations(record)
            }
        except UserError as error:
            raise record_error(record, str(error)) from None
        ((tokens, answer, *_),) = texts.turns([turn])
        gold = Span(tokens.ids.tolist(), max(1, answer))
        examples.append(Example(index, turn.text[: turn.answer], gold.ids[:answer], gold, scored))
    return examples


def rendered_prompts(
    records: Mapping[int, Record], tokenizer: PreTrainedTokenizerBase, *, plain: bool = False
) -> dict[int, str]:
    """Return the prompt of each record as text, for a server that tokenises it with the same tokenizer.

    The server, too, adds special tokens in front as the tokenizer does.

    Args:
        records: those of the test file.
        tokenizer: that of the model which the server runs.
        plain: take the plain format instead of the chat template.

    Raises:
        UserError: the server would read other tokens than those of training; the message says where they differ.
    """
    template: Template = PlainTemplate(tokenizer) if plain else ChatTemplate(tokenizer)
    prompts: dict[int, str] = {}
    for example in make_examples(records.items(), tokenizer, template):
        try:
            prompts[example.index] = _text_for(example.prompt, example.prompt_ids, tokenizer)
        except UserError as error:
            remedy = "leave `completions` out, so that messages are sent"
            raise record_error(records[example.index], f"{error}; {remedy}") from None
    return prompts


def _text_for(prompt: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt, or the prompt without its begin-of-text token, whose tokens are ``ids``; UserError if none."""
    # Most servers add the begin-of-text token.
    for text in (prompt.removeprefix(tokenizer.bos_token or ""), prompt):
        fault = difference(tokenizer, tokenizer(text)["input_ids"], ids, "a server that reads the prompt as text")
        if fault is None:
            return text
    raise UserError(str(fault))


def notes_on_prompts(
    examples: Sequence[Example], records: Mapping[int, Record], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[str]:
    """Return notes: a program that serves the evaluated folder sends other prompts; the template omits a part.

    Args:
        examples: tokenised records; a few are compared.
        records: as read, by their position in the test file.
        tokenizer: as plain transformers loads it from the folder.
        template: by which the examples were made.
    """
    unread = (parts_without_use(template, *record.chat) for record in records.values())
    notes = [f"not used: {part}" for part in dict.fromkeys(chain.from_iterable(unread))]
    first = sorted(examples, key=lambda example: example.index)[:_COMPARED]
    notes += _notes_on_spelling(first, records, tokenizer)
    if not isinstance(template, ChatTemplate):
        return notes
    for example in first:
        record = records[example.index]
        messages, (_, tools, variables) = template.normalise(record.messages[:-1]), record.chat
        try:
            fault = difference(tokenizer, served_prompt(tokenizer, messages, tools, variables), example.prompt_ids)
        except UserError as error:
            fault = str(error)
        if fault is not None:
            remedy = "'stepjepa export' of a run writes a folder whose template gives the prompts of training"
            return [
                *notes,
                f"programs that serve this folder send other prompts (line {record.line}: {fault}); {remedy}",
            ]
    return notes


def _notes_on_spelling(
    examples: Sequence[Example], records: Mapping[int, Record], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Say that the tokenizer can't write right answers as they are: it lowers their case, or lacks characters."""
    changed = []
    for example in examples:
        options: JsonObject = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        written = str(tokenizer.decode(example.gold.ids[example.gold.start :], **options))
        truth = content_part(records[example.index].answer).strip()
        if "".join(composed(truth).split()) not in "".join(composed(written).split()):
            changed.append((records[example.index].line, truth, written))
    if not changed:
        return []
    line, truth, written = changed[0]
    count = f"{len(changed)} of the first {len(examples)} right answers"
    return [
        f"the tokenizer changes {count}, which can't be given exactly (line {line}: {shown(truth)}: {shown(written)})"
    ]


def _continuation_span(record: Record, continuation: Continuation, texts: TextTokenizer, template: Template) -> Span:
    """Return the range of tokens of a continuation in its sequence."""
    if continuation.context is None:
        messages, tools, variables = record.chat
        turn = template.last_turn(
            [*messages[:-1], {"role": "assistant", "content": continuation.text}], tools, variables
        )
        start, end = turn.spans[-1]
        # Cut here, so that no token contains text after the continuation.
        ((tokens, *_),) = texts.turns([turn._replace(text=turn.text[:end])])
    else:
        # A rendered prompt has its special tokens; a context of its own needs the one that begins texts.
        begin = texts.tokenizer.bos_token or ""
        start = len(begin) + len(continuation.context)
        text = begin + continuation.context + continuation.text
        (tokens,) = texts([text], [[(len(begin), len(text))]])
    # The first token of a row has no prediction.
    return Span(tokens.ids.tolist(), max(1, tokens.first_overlapping(start)))
