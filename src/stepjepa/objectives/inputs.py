"""What a ``Jepa`` reads: the inputs of an embedder, bare texts or records, and its options; questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict

from stepjepa.base.arguments import kind_of
from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.other_names import OtherNames
from stepjepa.base.similar_names import question as suggestion
from stepjepa.base.similar_names import similar_names
from stepjepa.base.terminal import note
from stepjepa.chat.marks import Message
from stepjepa.chat.unused import Reads, parts_without_use
from stepjepa.config.jepa import Pooling
from stepjepa.data.columns import ASSISTANT, CHATS, USER
from stepjepa.data.messages import SYSTEM_ROLES, from_json, is_absent, read_message, source_role
from stepjepa.data.reading_notes import tell_unused
from stepjepa.data.record import Record
from stepjepa.data.records import as_records
from stepjepa.objectives.fitted import Fitted, FittedHeads, FittedMap

PLACEHOLDER = "."
"""Stands for an answer that is never read."""


@dataclass(frozen=True, slots=True)
class Text:
    """A bare text to embed, with its place in a file for error messages."""

    text: str
    path: str = "<memory>"
    line: int = 0  # counted from 1


Inputs = Iterable[str | Text | Record | JsonObject]
"""Texts, or records: ``Record``, dicts with ``messages``, a data frame, a ``datasets.Dataset``."""


def as_inputs(values: Any, *, open_chats: bool) -> list[Text] | list[Record]:
    """Convert :data:`Inputs` to texts or to records.

    With ``open_chats`` a chat may end in the user's turn, as a question does that has no answer yet.

    Raises:
        ValueError: a single text or record, or texts among records.
        TypeError: what is passed holds no values.
        UserError: a record is wrong.
    """
    if isinstance(values, str | Text | Record):
        kind = "record" if isinstance(values, Record) else "text"
        raise ValueError(f"inputs: expected a list of texts or of records, got one {kind}; put it into a list")
    # Tables iterate over their columns, or not at all, and objects over their keys, which are no texts to embed.
    is_table = hasattr(values, "columns") or hasattr(values, "column_names") or isinstance(values, Mapping)
    if isinstance(values, bytes) or not (is_table or isinstance(values, Iterable)):
        raise TypeError(f"inputs: expected a list of texts or of records, got {kind_of(values)}")
    items: list[Any] = []
    if not is_table:
        items.extend(values)
    texts = [isinstance(item, str | Text) for item in items]
    if any(texts):
        if not all(texts):
            place = texts.index(False)
            raise ValueError(f"inputs: expected texts alone or records alone, got no text at index {place}")
        return [Text(item, line=line) if isinstance(item, str) else item for line, item in enumerate(items, start=1)]
    return list(as_records(values if is_table else items, change=with_answer if open_chats else None))


def with_answer(row: Any) -> Any:
    """Append a placeholder answer, which is never read, to a row whose chat ends in a question or result.

    The result is that of a tool; the question may also be in a separate column. Any other value is returned unchanged.
    """
    if not isinstance(row, Mapping):
        return row
    name = next((column for column in CHATS if not is_absent(row.get(column))), None)
    if name is None:
        has_question, has_answer = (any(not is_absent(row.get(name)) for name in names) for names in (USER, ASSISTANT))
        return {**row, ASSISTANT[0]: PLACEHOLDER} if has_question and not has_answer else row
    try:
        chat = from_json(row[name], name, "a list of messages")
    except UserError:  # the reader of the record says so
        return row
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(last, Mapping) or source_role(last) not in ("user", "tool"):
        return row
    return {**row, name: [*chat, {"role": "assistant", "content": PLACEHOLDER}]}


Chat = str | Sequence[Message] | Record | JsonObject
"""A question to a model: a text; the messages of a chat up to the turn to be generated; or a record, which may have
``tools`` and ``chat_template_kwargs`` beside its ``messages``, and whose last answer is not part of the prompt."""


class Question(NamedTuple):
    """A chat up to the turn to be generated, with all that a template renders beside it."""

    messages: Sequence[Message]
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None

    def behind(self, system_prompt: str | None) -> Question:
        """Return the question behind a system prompt, unless there is none or the chat has one of its own."""
        if not system_prompt or self.messages[0]["role"] in SYSTEM_ROLES:
            return self
        return self._replace(messages=[{"role": "system", "content": system_prompt}, *self.messages])


def as_questions(chats: Iterable[Chat]) -> list[Question]:
    """Read questions; their messages are read as those of records.

    Raises:
        ValueError: a single text or record in place of a list, or a chat without messages.
        TypeError: what is passed is no list of questions, or one of them no question.
        UserError: a message or a record is wrong.
    """
    if isinstance(chats, str | Mapping | Record):
        kind = "text" if isinstance(chats, str) else "record"
        raise ValueError(f"questions: expected a list of questions, got one {kind}; put it into a list")
    given: object = chats  # a caller without types may pass anything
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"questions: expected a list of questions, got {kind_of(given)}")
    questions = [_question(chat) for chat in chats]
    if not all(question.messages for question in questions):
        raise ValueError("question: expected a text or messages, got an empty list")
    return questions


def note_without_use(template: Reads, questions: Iterable[Question]) -> None:
    """Print the parts of questions that a template does not read, each once with the reason."""
    for part in dict.fromkeys(part for question in questions for part in parts_without_use(template, *question)):
        note(f"not used: {part}")


def _question(chat: Chat) -> Question:
    given: object = chat  # a caller without types may pass anything
    if isinstance(chat, str):
        return Question([{"role": "user", "content": chat}])
    if isinstance(given, bytes) or not isinstance(given, Iterable | Record):
        raise TypeError(f"question: expected a text, messages or a record, got {kind_of(given)}")
    if not isinstance(chat, Mapping | Record):
        return Question(_messages(chat))
    (record,) = as_records([chat], change=with_answer)
    tell_unused([record], extra=False)
    return Question(record.messages[:-1], record.tools, record.chat_template_kwargs)


def _messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages in the form of a record, and print the keys that are not read."""
    if any(isinstance(turn, str | Record) for turn in messages):
        raise ValueError("question: expected a text or messages, got a list of questions; pass it to answers")
    parsed = [read_message(turn, f"question[{number}]") for number, turn in enumerate(messages)]
    if unused := dict.fromkeys(key for _, keys in parsed for key in keys):
        note(f"not used: {', '.join(f'question[].{key}' for key in unused)}")
    return [message for message, _ in parsed]


class EmbedOptions(TypedDict, total=False):
    """Options of :meth:`Jepa.embedder`, which describes them."""

    batch_size: int
    raw: bool
    layer: int | None
    pooling: Pooling | None
    max_length: int | None
    linear_map: FittedMap | None
    projection_heads: FittedHeads | None


def options_behind(fitted: Fitted) -> EmbedOptions:
    """Return the option by which vectors are those behind a map."""
    if isinstance(fitted, FittedMap):
        return {"linear_map": fitted}
    assert isinstance(fitted, FittedHeads)
    return {"projection_heads": fitted}


def fitted_of(options: EmbedOptions) -> Fitted | None:
    """Return the map of the options; None where vectors are those of the model."""
    return options.get("linear_map") or options.get("projection_heads")


_OTHER_NAMES = {
    "normalize_embeddings": "vectors have length 1 unless raw=True",
    "normalize": "vectors have length 1 unless raw=True",
    "show_progress_bar": "leave it out; a terminal shows a bar",
    "convert_to_numpy": "leave it out; vectors are a NumPy array",
    "convert_to_tensor": "torch.from_numpy(vectors) makes a tensor of them",
    "prompt": "side='source' embeds questions, side='target' answers",
    "prompt_name": "side='source' embeds questions, side='target' answers",
    "device": "name it in Jepa.from_pretrained(path, device=...)",
    "truncate_dim": "vectors[:, :N] has the first N dimensions",
    "max_seq_length": "pass max_length",
    "top_k": "pass k to search",
    "k": "pass it to search",
}
"""Options by which other libraries embed -> what to do instead."""


class EmbedsByOtherNames(OtherNames):
    """The base of ``Jepa``: answers the methods by which models of other libraries embed, answer and save."""

    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("encode", "encode_query"), "embed(texts) embeds questions"),
        "encode_document": "embed(texts, side='target') embeds answers",
        "similarity": "embed(...) @ embed(..., side='target').T has the cosines; index(texts).search(queries) finds",
        **dict.fromkeys(("generate", "chat"), "answer(question) answers; .model is the model"),
        **dict.fromkeys(("save_pretrained", "push_to_hub"), "save(folder) writes the model and its settings"),
        **dict.fromkeys(("parameters", "to", "train", "eval", "device"), "it is no module; .model is the model"),
    }


def check_options(options: EmbedOptions) -> None:
    """Raise a ``TypeError`` for an option that there is not, which would have no effect."""
    names = [*EmbedOptions.__annotations__]
    if unknown := [name for name in options if name not in names]:
        near = suggestion(similar_names(unknown[0], names)) or f"there are {', '.join(names)}"
        raise TypeError(f"there is no option '{unknown[0]}' to embed; {_OTHER_NAMES.get(unknown[0], near)}")
