"""The search index of a corpus file; its embeddings are stored beside it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Unpack

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.thought import without_thought
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.columns import ASSISTANT, CHATS, USER
from stepjepa.data.messages import is_absent, number_as_text
from stepjepa.data.reading_notes import named
from stepjepa.data.records import parse_record
from stepjepa.data.row_error import Remedy, RowError
from stepjepa.data.sources import read_rows
from stepjepa.evaluation.stored_arrays import ArrayFile, Arrays
from stepjepa.objectives.index import TextIndex, distinct
from stepjepa.objectives.inputs import EmbedOptions, Text, fitted_of, with_answer
from stepjepa.objectives.jepa import Jepa
from stepjepa.store.fingerprint import model_fingerprint
from stepjepa.views.sequences import Kind

SUFFIX = ".embeddings.safetensors"
_SKIP = Remedy("bad_records", "leave such lines out with `bad_records skip`", "leave such lines out")
FORMAT = "stepjepa embeddings of a corpus, 1"


def read_texts(
    path: str, column: str | None, *, answers: bool, setting: str = "column", bad: BadRecords | None = None
) -> list[Text]:
    """Read the texts of a file.

    Args:
        path: JSON lines, CSV, TSV, Parquet or Arrow.
        column: the column of the texts; None for the last answer or question of a chat, or else the first column with a
            usual name for answers, ``text`` or questions.
        answers: read answers; else questions.
        setting: the setting that is ``column``, for errors.
        bad: what happens to lines that hold no text or are not valid; by default they are an error.

    Raises:
        UserError: a line is refused, or none is left.
    """
    bad, texts, remedies = bad or BadRecords(), [], list[str | Remedy]()
    for line, row in read_rows(path, bad=bad):
        try:
            value = number_as_text(row.get(column) if column is not None else _text_of(row, path, line, answers))
        except UserError as error:
            bad.handle(error, line)
            continue
        if isinstance(value, str) and (without_thought(value) if answers else value).strip():
            texts.append(Text(value, path, line))
            continue
        if isinstance(value, str) and value.strip():
            problem, remedies = "the text is a thought without an answer", ["add the answer behind it", _SKIP]
        elif isinstance(value, str):
            problem = "the text is empty" if column is None else f"the column '{column}' is empty"
            remedies = ["fill it in", _SKIP]
        else:
            lacks = "has no answer" if answers else "has no question"
            problem = lacks if column is None else f"has no text in the column '{column}'"
            remedies = [f"name the `{setting}` of the texts, one of {named(row)}"]
        bad.handle(RowError(problem, *remedies, path=path, line=line), line)
    bad.tell()
    if not texts:
        raise UserError(f"holds no texts{' besides skipped lines' if bad.count else ''}; add at least one", path=path)
    return texts


def _text_of(row: JsonObject, path: str, line: int, answers: bool) -> object:
    """Return the text of a row whose columns have usual names; None if it has none. A chat may lack its last answer.

    UserError if the last answer of a chat is a tool call without text, which has no embedding.
    """
    names = (*ASSISTANT, "text") if answers else USER
    text = next((row[name] for name in (*CHATS, *names) if not is_absent(row.get(name))), None)
    is_chat = isinstance(text, list) or any(not is_absent(row.get(name)) for name in CHATS)
    if not is_chat:
        return text
    messages = parse_record(row if answers else with_answer(row), path, line).messages
    last = [message for message in messages if message["role"] == ("assistant" if answers else "user")][-1]
    if last.get("tool_calls") and not last["content"].strip():
        problem = "the last answer is a tool call without text"
        raise RowError(problem, "end the chat with an answer in text", _SKIP, path=path, line=line)
    return last["content"]


def corpus_index(
    jepa: Jepa,
    model_path: str,
    path: str,
    texts: list[Text],
    side: Kind = "target",
    *,
    cache: bool = True,
    **options: Unpack[EmbedOptions],
) -> TextIndex:
    """Make the index of a corpus, from the file beside it if that has the embeddings of this model and these texts.

    Args:
        jepa: the model.
        model_path: the folder that it was loaded from.
        path: the corpus; its embeddings are in ``path`` with :data:`SUFFIX`.
        texts: the texts of the corpus.
        side: the side of the texts.
        cache: read and write the file beside the corpus.
        options: of ``Jepa.embedder``.

    Raises:
        UserError: the name of the embeddings is taken by a file of another program; or a text is wrong.
    """
    if not cache:
        return jepa.index(texts, side, **options)
    fingerprint = corpus_fingerprint(jepa, model_path, texts, side, options)
    file = ArrayFile(
        Path(f"{path}{SUFFIX}"),
        FORMAT,
        "the corpus' embeddings",
        "model, corpus, readout or map",
        "the corpus is embedded again",
    )
    if (stored := file.read(fingerprint)) is not None:
        entries, first = distinct(texts)
        return TextIndex(jepa, [entry.text for entry in entries], first, stored.arrays["vectors"], side, options)
    index = jepa.index(texts, side, **options)
    file.write(fingerprint, Arrays({"vectors": index.vectors}, {}))
    return index


def loaded_model(jepa: Jepa, model_path: str) -> JsonObject:
    """Return the facts about a loaded model that its embeddings depend on."""
    return {"model": model_fingerprint(model_path), "dtype": str(jepa.model.dtype), "system": jepa.system_prompt}


def corpus_fingerprint(jepa: Jepa, model_path: str, texts: list[Text], side: Kind, options: EmbedOptions) -> str:
    """Hash everything that determines the embeddings of a corpus.

    Args:
        jepa: the model.
        model_path: the folder that it was loaded from.
        texts: of the corpus.
        side: on which they are embedded.
        options: those of ``Jepa.embedder``; ``layer``, ``pooling`` and the map or the heads count.
    """
    readout: JsonObject = {"side": side, "layer": options.get("layer"), "pooling": options.get("pooling")}
    if (fitted := fitted_of(options)) is not None:
        readout[fitted.name] = fitted.fingerprint
    digest = hashlib.sha256(json.dumps(loaded_model(jepa, model_path) | readout).encode())
    for text in texts:
        digest.update(f"{len(text.text)}:{text.text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
