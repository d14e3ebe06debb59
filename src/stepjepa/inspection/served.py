"""Check that a saved folder is served as it was trained: its prompts, its stop tokens, the texts of its answers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer, GenerationConfig

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, shown
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.marks import REASONING_KEYS, Message
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.served import difference, served_prompt, trained_turns
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.thought import opening_tag, thought_in
from stepjepa.config.jepa import DEFAULTS, JepaConfig
from stepjepa.config.run import RunConfig
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.data.sources import read_records
from stepjepa.models.loading import load_tokenizer
from stepjepa.store.folder import CONFIG_FILE, run_folder_of
from stepjepa.store.record import RunRecord, record_of
from stepjepa.views.sequences import Ids, TokenizedRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_COMPARED = 32  # records with which an export is checked
_CHAT = [
    {"role": role, "content": text}
    for role, text in (("user", "One?"), ("assistant", "Two."), ("user", "And then?"), ("assistant", "Three."))
]


class ShownTurn(NamedTuple):
    """A turn as the model sees it in training."""

    prompt: Ids  # the tokens in front of the first label
    answer: Ids  # the tokens that are trained
    is_cut: bool  # it may continue beyond ``max_length``


def shown_turns(record: TokenizedRecord, max_length: int) -> Iterator[ShownTurn]:
    """Yield the turns of a tokenised record: each is a run of consecutive labels."""
    for text in record.texts:
        for run in np.split(text.labels, np.flatnonzero(np.diff(text.labels) != 1) + 1):
            if len(run):
                start, end = int(run[0]) + 1, int(run[-1]) + 2
                yield ShownTurn(text.ids[:start], text.ids[start:end], end >= max_length)


def check_served(
    folder: str | os.PathLike[str],
    record_tokenizer: RecordTokenizer,
    records: Sequence[Record],
    tokenized: Sequence[TokenizedRecord],
    *,
    trust_remote_code: bool = False,
) -> str:
    """Check a folder with tokenizer and generation settings against the trained tokens of some records.

    * For every trained turn the ids in front of its first label are those of plain ``apply_chat_template``.
    * Its last label is a token at which plain ``generate`` stops.
    * Its labels hold all texts of its message: content, thought, arguments of tool calls.

    Args:
        folder: as saved; read with plain transformers.
        record_tokenizer: the tokenizer of ``tokenized``.
        records: as read.
        tokenized: the same records as tokens, without skipped ones; matched by their lines.
        trust_remote_code: run code that comes with the tokenizer.

    Returns:
        One line: the number of compared turns, and the text of the template that is neither in a prompt nor trained.

    Raises:
        ValueError: a turn differs; the error names line, message and difference.
    """
    template, config = record_tokenizer.template, record_tokenizer.config
    if config.labels != "assistant":
        return f"labels '{config.labels}' were asked for, so no turn is behind a prompt"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    stops = _stop_ids(folder)
    _check_stop_tokens(template, stops)
    if not isinstance(template, ChatTemplate):
        return f"no chat format, so no server has a prompt; generation stops at {_named(template.stop_tokens)}"
    comparison = _Comparison(tokenizer, template, config.max_length, stops)
    by_line = {record.line: record for record in tokenized}
    for record in records:
        if record.line in by_line:
            comparison.check(record, by_line[record.line])
            comparison.untrained.update(turn.untrained for turn in record_tokenizer.turns(record) if turn.untrained)
    return comparison.describe()


class _Comparison:
    """Compares trained turns with what a server sends and generates, and counts them.

    Args:
        tokenizer: of the saved folder.
        template: of training.
        max_length: the longest record of training, in tokens.
        stops: the tokens at which generation stops.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, max_length: int, stops: set[int]
    ) -> None:
        self.tokenizer, self.template, self.max_length, self.stops = tokenizer, template, max_length, stops
        self.turns = 0
        self.unspelled = 0  # answers with characters that the tokenizer does not know
        self.untrained = Counter[str]()  # texts behind an answer that are neither prompt nor trained

    def check(self, record: Record, tokenized: TokenizedRecord) -> None:
        """Raise ValueError if a turn of the record differs."""
        turns = list(shown_turns(tokenized, self.max_length))
        expected = [
            (index, prompt)
            for index, prompt in _served(self.tokenizer, self.template, record)
            # Truncation leaves no answer behind a longer prompt.
            if len(prompt) < self.max_length
        ]
        if len(turns) != len(expected):
            raise ValueError(
                f"line {record.line}: {len(turns)} turns are trained, its messages ask for {len(expected)}"
            )
        for (index, prompt), turn in zip(expected, turns, strict=True):
            where = f"line {record.line}, message {index + 1}"
            if (fault := difference(self.tokenizer, prompt, turn.prompt.tolist())) is not None:
                raise ValueError(f"{where}: {fault}")
            self.turns += 1
            if not turn.is_cut:
                self._check_answer(record.messages[index], turn, where)

    def _check_answer(self, message: Message, turn: ShownTurn, where: str) -> None:
        """Raise ValueError if the trained tokens do not end with a stop token, or lack a text of the message."""
        if int(turn.answer[-1]) not in self.stops:
            last = shown(decoded(self.tokenizer, turn.answer[-1:]))
            raise ValueError(f"{where}: it is trained up to {last}, at which generation does not stop")
        self.unspelled += not _check_texts(self.tokenizer, message, turn, where)

    def describe(self) -> str:
        """Return the result in one line; ValueError if no turn was compared."""
        if not self.turns:
            raise ValueError("no turn is left to compare: max_length cuts every record in its prompt; raise it")
        line = f"{counted(self.turns, 'turn')}: their prompts are those of plain apply_chat_template, "
        line += f"and generation stops at {_named(self.template.stop_tokens)}"
        if self.untrained:
            texts = self.untrained.most_common(3)
            rendered = ", ".join(f"{shown(text)} ({counted(count, 'time')})" for text, count in texts)
            line += f"; behind them the template writes {rendered}, neither prompt nor trained"
        if self.unspelled:
            line += f"; answers with characters that the tokenizer does not know: {self.unspelled}"
        return line


def _check_stop_tokens(template: ChatTemplate | PlainTemplate, stops: set[int]) -> None:
    """Raise ValueError if generation does not stop at a token that ends a turn."""
    for token, index in zip(template.stop_tokens, template.stop_ids, strict=True):
        if index not in stops:
            raise ValueError(
                f"generation_config.json lacks {shown(token)}, which ends a turn: generation would continue"
            )


def check_export(
    folder: str | os.PathLike[str], model_path: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> str:
    """Check that a folder to be exported or uploaded is served as its run was trained.

    Its prompts are compared on the first records of the run's training file or, if the file is missing, on made-up
    chats with the run's system prompts.

    Args:
        folder: the exported folder.
        model_path: run or checkpoint folder.
        trust_remote_code: run code that comes with the tokenizer.

    Returns:
        One line with the number of compared turns and the records that they are from.

    Raises:
        UserError: the folder is not served as the model was trained.
    """
    run = record_of(model_path) or RunRecord()
    recorded = JepaConfig(**{name: value for name, value in (run.jepa or {}).items() if name in DEFAULTS})
    settings = {name: getattr(recorded, name) for name in ("labels", "plain", "max_length", "chat_template_kwargs")}
    config = JepaConfig(mode="regular", over_length="truncate", **settings)
    record_tokenizer = RecordTokenizer(load_tokenizer(str(model_path), trust_remote_code=trust_remote_code), config)
    records, source = _records_of_run(Path(model_path), run)
    try:
        tokenized = record_tokenizer.tokenize(records)
        summary = check_served(folder, record_tokenizer, records, tokenized, trust_remote_code=trust_remote_code)
    except ValueError as error:
        remedy = "restore chat_template.jinja and generation_config.json of the run"
        raise UserError(
            f"it would not be served as it was trained ({source}, {error}); {remedy}", path=folder
        ) from None
    return f"{summary} ({source})"


def _records_of_run(model_path: Path, run: RunRecord) -> tuple[list[Record], str]:
    """Return some training records of a run, or made-up chats; and a description of them."""
    try:
        config = RunConfig.read(run_folder_of(model_path) / CONFIG_FILE)
        name = str(config.train_file or config.data_file)
        # A relative path counts from the directory of the training. Not a data set of the hub.
        file = next(filter(Path.is_file, (Path(run.directory or "", name), Path(name))), None)
        if file is not None:
            bad = BadRecords("skip")
            return read_records(file, bad=bad, columns=config.columns, limit=_COMPARED), f"records of {file.name}"
    except (UserError, OSError):
        pass  # a folder of another program or machine; made-up chats take the place of its records
    system = run.system_prompts or [None]
    chats = [[*([{"role": "system", "content": text}] if text else []), *_CHAT] for text in system]
    records = [parse_record({"messages": chat}, "made-up chats", line) for line, chat in enumerate(chats, start=1)]
    return records, "made-up chats, since the training file is not here"


def _served(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, record: Record
) -> Iterator[tuple[int, list[int]]]:
    """Yield index and prompt of each trained message of a record; the prompt is the one that a server makes."""
    chat = template.normalise(record.messages)
    for index in trained_turns(record.messages):
        try:
            yield index, served_prompt(tokenizer, chat[:index], record.tools, record.chat_template_kwargs)
        except UserError as error:
            raise ValueError(f"line {record.line}, message {index + 1}: {error}") from None


def _stop_ids(folder: str | os.PathLike[str]) -> set[int]:
    """Return the tokens at which plain ``generate`` stops, by a folder's generation settings."""
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        raise ValueError("the folder has no generation_config.json, so that generation would not stop") from None
    return {*ends} if isinstance(ends, list) else {ends} - {None}


def _check_texts(tokenizer: PreTrainedTokenizerBase, message: Message, turn: ShownTurn, where: str) -> bool:
    """Raise a ``ValueError`` if the trained tokens of a turn lack a text of its message.

    Returns:
        Whether the tokenizer can spell all of it.
    """
    if has_unknown(tokenizer, turn.answer):
        return False
    answer = squeezed(tokenizer, decoded(tokenizer, turn.answer))
    for key, text in _texts(message, opening_tag(decoded(tokenizer, turn.prompt))):
        spellings = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        if not any(squeezed(tokenizer, spelling) in answer for spelling in spellings):
            raise ValueError(f"{where}: '{key}' ({shown(text)}) is not trained")
    return True


def has_unknown(tokenizer: PreTrainedTokenizerBase, answer: Ids) -> bool:
    """Return whether an answer, with its stop token, has characters that the tokenizer does not know."""
    # The stop token, which may also stand for unknown characters, is no part of the texts.
    return tokenizer.unk_token_id is not None and tokenizer.unk_token_id in answer[:-1]


def _texts(message: Message, opened: str | None) -> Iterator[tuple[str, str]]:
    """Yield all texts of a message with their keys; ``opened`` is the think tag that its prompt ends in."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            yield key, message[key]
    content = str(message.get("content") or "")
    # A template may write other white space between a thought and what follows it.
    thought = thought_in(content, opened=opened)
    for part in (content,) if thought is None else (content[thought.start : thought.end], content[thought.answer :]):
        yield "content", part
    waiting: list[object] = [call["function"] for call in message.get("tool_calls") or ()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield "tool_calls", value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> str:
    """Decode tokens, special ones included."""
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def squeezed(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text as the tokenizer normalises it (many compose characters, NFC), without white space."""
    backend: Any = tokenizer.backend_tokenizer
    normalised = text if backend.normalizer is None else str(backend.normalizer.normalize_str(text))
    return "".join(normalised.replace("\u2581", " ").split())


def _named(tokens: Sequence[str]) -> str:
    return " or ".join(map(repr, tokens))
