"""Inspect how records are tokenised, packed and labelled, and count a whole file.

Sequences and rows are built by the functions that training uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import count_tokens
from stepjepa.batch.prepare import check_usable
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer, TrainedTurn
from stepjepa.batch.view_text import step_views
from stepjepa.chat.turn_text import Turn
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.inspection.tree import BranchInfo, SequenceInfo, TokenInfo, describe_tree
from stepjepa.views.sequences import Ids, Pair, SampledRecord, TokenizedRecord, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inspection:
    """Some records as a micro-batch, counts of their file, facts of the chat template."""

    path: str
    index: int  # of the first record, counted from 0
    config: JepaConfig
    tokens: list[TokenInfo]  # those of all rows
    branches: list[BranchInfo]  # in the order of their tokens
    sequences: list[SequenceInfo]  # in the order of their records
    # For each record: 'line'; 'steps' (Step-JEPA) or 'answers', each with 'name' and the 'text' that is trained;
    # 'untrained', the names of answers that are left out; number of 'pairs'; 'views', the texts of each pair as
    # 'source' and 'target'; 'main_tokens', its length; 'main_texts', that of each of its texts.
    records: list[JsonObject]
    # For the whole file: 'lines'; 'counts', see tokenize.COUNTS; 'tokens', see dataset.Prepared.
    file: JsonObject
    template: dict[str, str]  # facts derived from the chat template
    refused: str | None = None  # the error with which training would refuse the file
    # The records among those asked for of which nothing is trained: 'line', and the 'reason'.
    left_out: list[JsonObject] = field(default_factory=list)


def inspect_records(
    records: Sequence[Record], index: int, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, count: int = 1
) -> Inspection:
    """Pack ``count`` records of a file from ``index`` on as one micro-batch and describe it, and the whole file.

    A record that would stop training (too long, or without a pair where one is required) does not stop the
    inspection: it is shown truncated, and counted, and ``refused`` is the error of training. One of which nothing is
    trained is in ``left_out``. Without ``row_length`` there is one row.

    Args:
        records: those of the whole file.
        index: the first one to describe, from 0.
        tokenizer: with the predictor tokens.
        config: of the run.
        count: number of records to describe.

    Raises:
        UserError: there is no such record, none of them is trained, or one can't be rendered.
    """
    if not 0 <= index < len(records):
        fault = f"`index {index}`: the file has {counted(len(records), 'record')}; choose 0 to {len(records) - 1}"
        raise UserError(fault, path=records[0].path if records else None)
    over = config.over_length
    lenient = replace(config, over_length="truncate" if over == "error" else over, require_pairs=False)
    record_tokenizer = RecordTokenizer(tokenizer, lenient)
    record_tokenizer.check_variables()
    tokenized = record_tokenizer.tokenize_each(records)
    collator = Collator.of(config, record_tokenizer.predictors.tolist())
    parts: list[list[TokenSequence]] = []
    infos: list[JsonObject] = []
    left_out: list[JsonObject] = []
    # It counts the records that are described once more, so the counts of the file are another one's.
    describing = RecordTokenizer(tokenizer, lenient)
    for record, tokens_of_record in zip(records[index : index + count], tokenized[index:], strict=False):
        if tokens_of_record is None:
            left_out.append({"line": record.line, "reason": _why_left_out(record, tokenizer, config)})
            continue
        parts.append(collator.sequences(SampledRecord(tokens_of_record)))
        infos.append(_describe_record(record, tokens_of_record, describing, config))
    if not infos:
        raise UserError(left_out[0]["reason"], path=records[index].path, line=left_out[0]["line"])
    tokens, branches, sequences = describe_tree(parts, [info["line"] for info in infos], config, tokenizer)
    return Inspection(
        path=records[index].path,
        index=index,
        config=config,
        tokens=tokens,
        branches=branches,
        sequences=sequences,
        records=infos,
        file={
            "lines": len(records),
            "counts": {name: record_tokenizer.counts[name] for name in COUNTS},
            "tokens": count_tokens(filter(None, tokenized), lenient),
        },
        template=record_tokenizer.describe(),
        refused=_refusal(records, tokenizer, config, record_tokenizer),
        left_out=left_out,
    )


def _describe_record(
    record: Record, tokenized: TokenizedRecord, record_tokenizer: RecordTokenizer, config: JepaConfig
) -> JsonObject:
    """Return the line, texts, views and counts of a record, see ``Inspection.records``."""
    tokenizer, predictors = record_tokenizer.tokenizer, record_tokenizer.predictors
    views = [_view_texts(pair, tokenizer, predictors, config) for pair in tokenized.all_pairs]
    texts = _trained_texts(record, record_tokenizer.trained_turns(record), config)
    lengths = {"main_tokens": tokenized.length, "main_texts": [len(text.ids) for text in tokenized.texts]}
    return {"line": record.line, **texts, "views": views, "pairs": len(views), **lengths}


def _trained_texts(record: Record, trained: Sequence[TrainedTurn], config: JepaConfig) -> JsonObject:
    """Return the texts that a record trains, cut off where training cuts them, see ``Inspection.records``.

    They are the steps of the last turn in Step-JEPA, else the answers: of all trained turns or, where a chat is trained
    as one text, of all its assistant messages.
    """
    is_turn = config.labels == "assistant"
    answers = {f"answer {number}": it for number, it in enumerate(trained, start=1)} if is_turn else {}
    untrained = [name for name, (_, end) in answers.items() if not end]
    steps, texts = dict[str, str](), dict[str, str]()
    if config.mode == "step-jepa":
        turn, end = trained[-1]
        views = step_views(turn, config.step_separator, config.steps_from)
        cut = [turn.text[view.start : min(view.end, end)] for view in views if view.start < end]
        steps = {f"step {number}": text for number, text in enumerate(cut, start=1)}
    elif is_turn:
        texts = {name: _cut(turn, turn.message, end) for name, (turn, end) in answers.items() if end}
    else:
        turn, end = trained[0]
        answers_at = [place for place, message in enumerate(record.messages) if message["role"] == "assistant"]
        if config.plain:  # it has the last exchange or, where all of it is trained, the last question alone
            answers_at = [place for place in answers_at if turn.spans[place] != (0, 0)]
        kept = [place for place in answers_at if turn.spans[place][0] < end]
        texts = {f"answer {number}": _cut(turn, place, end) for number, place in enumerate(kept, start=1)}
    if len(texts) == 1 and not untrained:
        texts = {"answer": next(iter(texts.values()))}
    named = ([{"name": name, "text": text} for name, text in each.items()] for each in (steps, texts))
    return {**dict(zip(("steps", "answers"), named, strict=True)), "untrained": untrained}


def _cut(turn: Turn, message: int, end: int) -> str:
    """Return the content of a message in the text of a turn, up to the character ``end``."""
    start, behind = turn.spans[message]
    return turn.text[start : max(start, min(behind, end))]


def _view_texts(pair: Pair, tokenizer: PreTrainedTokenizerBase, predictors: Ids, config: JepaConfig) -> JsonObject:
    """Return the texts of a pair's views, without predictor tokens."""
    ids = [view.content[~np.isin(view.content, predictors)] for view in pair]
    texts = [str(tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False)) for token_ids in ids]
    source, target = reversed(texts) if config.reverse_pred else texts
    return {"source": source, "target": target}


def _why_left_out(record: Record, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> str:
    """Return the error message for a record that is not trained at all."""
    fault = f"the record has more tokens than max_length {config.max_length}"
    cut = replace(config, over_length="truncate", require_pairs=False)
    if config.over_length == "skip" and RecordTokenizer(tokenizer, cut).tokenize([record]):
        return f"{fault}, and training leaves it out; raise `max_length`, or pass `over_length truncate`"
    does = "refuses it" if config.over_length == "error" else "leaves it out"
    return f"{fault} and no answer in so many: training {does}; raise `max_length`"


def _refusal(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, lenient: RecordTokenizer
) -> str | None:
    """Return the error of training for records that it refuses; None if it accepts them.

    Args:
        records: those of the whole file.
        tokenizer: with the predictor tokens.
        config: of the run.
        lenient: has tokenised the records without refusing any.
    """
    too_long = config.over_length == "error" and lenient.counts["over length"]
    try:
        if too_long or (config.require_pairs and lenient.counts["without a pair"]):
            RecordTokenizer(tokenizer, config).tokenize_each(records)
        check_usable(lenient, records[0].path)
    except UserError as error:
        return str(error)
    return None


def visible_matrix(inspection: Inspection) -> NDArray[np.bool_]:
    """Return ``[T, T]``: whether the query (dim 0) sees the key (dim 1)."""
    start, end = np.array([(token.start, token.end) for token in inspection.tokens]).T
    place = np.arange(len(start))
    sees: NDArray[np.bool_] = (start[:, None] <= place) & (place <= place[:, None]) & (place[:, None] < end)
    return sees
