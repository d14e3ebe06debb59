"""The fields of ``transformers.TrainingArguments`` that a run may set, described like our own settings.

Nothing here imports transformers before a field is asked for, since that takes seconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.base.similar_names import question
from stepjepa.config.option import About, Option, similar_settings

WITHOUT_EFFECT = ("do_train", "do_eval", "do_predict", "remove_unused_columns")
"""Fields of ``TrainingArguments`` that have no effect with ``JepaTrainer``, and are refused."""


_TRAINED_ALONE = ("leave it out: the assistant's tokens alone are trained anyway", "labels")
NEEDLESS = {
    "packing": ("leave it out: rows are packed without contamination anyway", "row_length"),
    "padding_free": ("leave it out: rows are packed without padding anyway", "row_length"),
    "assistant_only_loss": _TRAINED_ALONE,
    "completion_only_loss": _TRAINED_ALONE,
}
"""Setting of TRL's ``SFTConfig`` that is always on here -> what to do instead, and the setting of ours to look at."""


def changed_defaults() -> JsonObject:
    """Return the fields of ``TrainingArguments`` that have another default in ``stepjepa train``, by name."""
    return {
        "logging_steps": 10,
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else "none",
        # All processes log as much as the first.
        "log_level_replica": "passive",
    }


@cache
def trainer_options() -> Mapping[str, Option]:
    """Return every field of ``TrainingArguments`` by name, with its type, choices, default and help text."""
    from transformers import TrainingArguments

    hints = get_type_hints(TrainingArguments)
    return {
        field.name: _option(field, hints[field.name])
        for field in dataclasses.fields(TrainingArguments)
        if field.init and field.name not in WITHOUT_EFFECT
    }


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    """Describe one field: of a union the first type other than None and a plain text, if there is any."""
    hints = [inner_hint for inner_hint in get_args(hint) if inner_hint is not NoneType] if _is_union(hint) else [hint]
    kind = next((inner_hint for inner_hint in hints if inner_hint is not str), str)
    several = get_origin(kind) is list
    if several:
        kind = get_args(kind)[0]
    choices: tuple[str, ...] = ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices, kind = tuple(str(member.value) for member in kind), str
    elif get_origin(kind) is Literal or kind not in (int, float, bool, str):
        # Among them mappings, which are written as JSON.
        kind = str
    choices = choices or tuple(field.metadata.get("choices", ()))
    help_text = " ".join(str(field.metadata.get("help", "")).split()).replace("`", "")
    about: About = {"help": help_text, "text": str in hints}
    return Option(field.name, kind, several, choices, field.default, about)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def read_trainer_field(name: str, value: object) -> Any:
    """Check a value by the type of its field, and convert a text, such as ``1e-5`` of a YAML file, to that type.

    Raises:
        UserError: there is no such field, it can't be set here, or the value is of another type.
    """
    if name in WITHOUT_EFFECT:
        raise UserError(f"{name}: it has no effect here; leave it out")
    if name == "hub_token":
        # Every user of the machine can read a command line, and the run folder keeps the settings.
        raise UserError("hub_token: set HF_TOKEN in the environment; leave it out")
    option = trainer_options().get(name)
    if option is None:
        raise UserError(unknown_setting(name))
    if isinstance(value, Mapping):
        try:
            return json.loads(json.dumps(value))
        except (ValueError, TypeError) as error:  # a date of Python, or a mapping that holds itself
            raise UserError(f"{name}: {error}") from None
    if isinstance(value, Enum):
        value = value.value
    if not isinstance(value, str | int | float | list | tuple):
        raise UserError(f"{name}: expected a text, a number, a list or a mapping, got {shown(value)}")
    read = option.convert(value)
    # A field that takes a text or a list gets the text.
    return read[0] if option.several and len(read) == 1 and option.about["text"] else read


def unknown_setting(name: str, others: tuple[str, ...] = ()) -> str:
    """Return the message for a setting that exists neither in a run nor in ``TrainingArguments``."""
    near = similar_settings(name, [*others, *trainer_options()])
    return f"unknown setting {shown(name)}; {question(near) or 'leave it out'}"
