"""Settings declared as dataclass fields: type, default, help text, choices and range of each, in one place.

Flags, the list in ``help(...)`` and the errors for a wrong value or a mistyped name are made of that declaration.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
import os
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, wraps
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from stepjepa.base.arguments import expanded
from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import WrittenFloat, WrittenInt, read_float, read_int
from stepjepa.base.similar_names import did_you_mean, question, similar_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Range = tuple[Callable[[Any], bool], str]
"""A test whether a value is allowed, and its description for messages. Every test is false for NaN."""

FROM_ZERO: Range = (lambda value: 0 <= value < math.inf, "0 or more")
FROM_ONE: Range = (lambda value: value >= 1, "1 or more")
FROM_TWO: Range = (lambda value: value >= 2, "2 or more")
POSITIVE: Range = (lambda value: 0 < value < math.inf, "a number above 0")
SHARE: Range = (lambda value: 0 < value < 1, "a share between 0 and 1")
SHARE_OR_ALL: Range = (lambda value: 0 < value <= 1, "a share above 0 and up to 1")
BELOW_ONE: Range = (lambda value: 0 <= value < 1, "0 or more and less than 1")

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Details(TypedDict, total=False):
    """Facts about an option beside type, default and help text, as :func:`option` takes them.

    Some have a meaning for some options only: those of ``JepaConfig`` (``affects``, ``views``), of ``RunConfig``
    (``launch``) and of ``transformers.TrainingArguments`` (``text``).
    """

    group: str
    """Heading in the help, instead of the class's."""

    flag: str
    """Name of the flag, if it is not that of the field."""

    names: tuple[str, ...]
    """Other names of the flag."""

    metavar: str
    """Placeholder of the value in the help."""

    choices: tuple[str, ...]
    """Allowed values, if the type is no ``Literal``."""

    allowed: Range
    """Test of a value, and its description for messages."""

    parse: Callable[[str], Any]
    """Converts the text of a flag; by default the type decides."""

    expected: str
    """Description of the texts that ``parse`` converts; by default that of ``allowed``."""

    const: object
    """Value of a flag that is named without a value."""

    positional: bool
    """Whether the command line has it without a flag."""

    only_with: str
    """Options without which this one has no effect: ``lora``, or ``target_grad ema``; several are joined by ``or``."""

    affects: Literal["sequences", "encoding", "objective"]
    """First stage of training whose results depend on it."""

    views: bool
    """Whether it has no effect in regular training."""

    path: Literal[True, "or name"]
    """That it holds a path, which may differ on another machine, and may begin with ``~``; or a name in its place."""

    launch: bool
    """Whether it belongs to one launch, so that the description of a run leaves it out."""

    text: bool
    """Whether a field that takes several values also takes one text."""


class About(Details, total=False):
    """All facts about an option beside type and default."""

    help: str


def option(default: Any = MISSING, help: str = "", **details: Unpack[Details]) -> Any:
    """Declare a dataclass field that is an option of a command.

    Args:
        default: the default value; without one the flag is required.
        help: the help text; ``--help`` shows it up to the first semicolon, ``--help_all`` and the reference show all.
        details: see :class:`Details`.
    """
    return field(default=default, metadata={"help": _HelpText(help, details)})


class _HelpText(str):
    """A help text with the other details of its option.

    They are no metadata of the field: ``HfArgumentParser`` of transformers passes all metadata on to argparse.
    """

    details: Details

    def __new__(cls, text: str, details: Details) -> Self:
        made = super().__new__(cls, text)
        made.details = details
        return made


@dataclass(frozen=True)
class Option:
    """One option: its name, the type of one value, whether it takes several, its choices and its metadata."""

    name: str
    type: Any
    several: bool
    choices: tuple[str, ...]
    default: Any
    about: About
    optional: bool = False  # whether it may be None

    @property
    def flag(self) -> str:
        """The name in a flat mapping: of a flag without its dashes, and of a line in a YAML file."""
        return str(self.about.get("flag", self.name))

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flag and its other names."""
        return (self.flag, *self.about.get("names", ()))

    @property
    def expected(self) -> str:
        """Description of its values."""
        if self.several:
            return "a list"
        return f"one of {', '.join(self.choices)}" if self.choices else _KINDS.get(self.type, (None, "a value"))[1]

    def fault(self, value: object) -> str | None:
        """Describe what is wrong with one value; None if it is allowed."""
        if value is None:
            return None
        if self.type in _KINDS:
            kind, words = _KINDS[self.type]
            if not isinstance(value, kind) or (isinstance(value, bool) and self.type is not bool):
                return f"expected {words}, got {shown(value)}"
        if self.choices and value not in self.choices:
            near = did_you_mean(str(value), self.choices)
            return f"expected one of {', '.join(self.choices)}, got '{value}'{near}"
        allowed, expected = self.about.get("allowed", (None, None))
        return None if allowed is None or allowed(value) else f"expected {expected}, got {value}"

    def read(self, text: str) -> Any:
        """Convert the text of a flag to one value; ``ValueError`` says what is wrong with it."""
        reader = READERS.get(self.type, str)
        if parse := self.about.get("parse"):
            reader = _reader(self.about.get("expected") or self.about.get("allowed", (None, "a number"))[1], parse)
        value = reader(text)
        if fault := self.fault(value):
            raise ValueError(fault)
        return self.expanded(value)

    def expanded(self, value: Any) -> Any:
        """Return one value, with the home folder in place of the ``~`` of a path."""
        return expanded(value) if value is not None and self.about.get("path") else value

    def convert(self, value: object) -> Any:
        """Convert a value of a YAML file, which may be a text where a number is meant (``1e-5``), to the field's type.

        Raises:
            UserError: the value is of another type or not allowed.
        """
        if self.several:
            return [self._convert_one(item) for item in (value if isinstance(value, list | tuple) else [value])]
        return self._convert_one(value)

    def _convert_one(self, value: object) -> Any:
        if isinstance(value, list | tuple):
            raise UserError(f"{self.flag}: expected one value, got the list {shown(str(value))}")
        if value is None:
            raise UserError(f"{self.flag}: {EMPTY_ITEM}")
        try:
            return self.read(typed_text(value))
        except (ValueError, TypeError) as error:  # json's own for what holds itself
            raise UserError(f"{self.flag}: {error}") from None


EMPTY_ITEM = "an item of its list is empty (null); fill it in or leave it out"
"""What is wrong with a list of a YAML file that holds None: its text would be the word."""


def typed_text(value: object) -> str:
    """Return a value of a YAML file as one types it in a shell, which expands the home folder."""
    text = json.dumps(value) if isinstance(value, dict | bool) else str(value)
    text = value.text if isinstance(value, WrittenInt | WrittenFloat) else text
    return expanded(text) if text.startswith("~/") else text


def options_of(*settings: DataclassInstance | type[DataclassInstance]) -> Iterator[Option]:
    """Yield the options of dataclasses, or of instances of them."""
    for owner in settings:
        yield from _options(owner if isinstance(owner, type) else type(owner))


@cache
def _options(owner: type[DataclassInstance]) -> tuple[Option, ...]:
    hints, options = get_type_hints(owner), []
    for owner_field in fields(owner):
        text = owner_field.metadata.get("help")
        if not isinstance(text, _HelpText):
            continue
        hint, several = hints[owner_field.name], False
        optional = NoneType in get_args(hint)
        if get_origin(hint) in (Union, UnionType):
            hint = next(inner for inner in get_args(hint) if inner is not NoneType)
        if get_origin(hint) in (list, tuple):
            hint, several = get_args(hint)[0], True
        about = cast(About, {"help": str(text), **text.details})
        choices = get_args(hint) if get_origin(hint) is Literal else tuple(about.get("choices", ()))
        options.append(Option(owner_field.name, hint, several, choices, owner_field.default, about, optional))
    return tuple(options)


def _reader(expected: str, convert: Callable[[str], T]) -> Callable[[str], T]:
    """Return a function that converts a text; its error says what was ``expected`` if ``convert`` raises one."""

    def read(text: str) -> T:
        try:
            return convert(text)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"expected {expected}, got {shown(text)}") from None

    return read


def _number(text: str) -> float:
    if math.isnan(value := read_float(text)):
        raise ValueError
    return value


_SWITCH = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}

_KINDS: Mapping[object, tuple[type | UnionType, str]] = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    bool: (bool, "true or false"),
    str: (str | os.PathLike, "a text"),
}
"""Type -> the type of its values in Python, and the words for it; a text may be a path."""

READERS: Mapping[object, Callable[[str], object]] = {
    int: _reader("a whole number", read_int),
    float: _reader("a number", _number),
    bool: _reader("true or false", lambda text: _SWITCH[text.lower()]),
}
"""Type -> function that converts the text of a flag."""


def check_values(settings: DataclassInstance) -> None:
    """Raise ``UserError`` for the first option that is out of range or not among its choices; expand ``~`` in paths."""
    for setting in options_of(settings):
        value = getattr(settings, setting.name)
        if isinstance(value, numbers.Number) and hasattr(value, "item"):
            # A number of NumPy, as Python's: files and the descriptions of runs have no other. 0.1 stays 0.1.
            value = int(value) if isinstance(value, numbers.Integral) else float(str(value))
            object.__setattr__(settings, setting.name, value)
        if value is None and not setting.optional:
            raise UserError(f"{setting.name}: expected {setting.expected}, got None")
        if setting.several and not isinstance(value, list | tuple | None):
            raise UserError(f"{setting.name}: expected a list, got {shown(value)}")
        several = setting.several and value is not None
        for item in value if several else (value,):
            if fault := setting.fault(item):
                raise UserError(f"{setting.name}: {fault}")
        if setting.about.get("path"):
            own = [*map(setting.expanded, value)] if several else setting.expanded(value)
            object.__setattr__(settings, setting.name, own)


def check_effects(values: Mapping[str, object], *settings: type) -> None:
    """Raise ``UserError`` for an option of these dataclasses without effect; see ``only_with`` of :func:`option`.

    ``values`` holds the value of every option, by name.
    """
    for setting in options_of(*settings):
        condition = setting.about.get("only_with")
        if condition is None or values[setting.flag] in (None, setting.default):
            continue
        if not has_effect(setting, values):
            words = " or ".join(f"`{other}`" for other in condition.split(" or "))
            raise UserError(f"`{setting.flag}` does nothing without {words}; add it or leave it out")


def has_effect(setting: Option, values: Mapping[str, object]) -> bool:
    """Return whether an option has an effect: it needs no other one, or one of those that it needs is set.

    Args:
        setting: the option; see ``only_with`` of :func:`option`.
        values: the value of every option, by name.
    """
    conditions = [condition.partition(" ") for condition in setting.about.get("only_with", "").split(" or ")]
    return conditions == [("", "", "")] or any(
        values[name] == value if value else values[name] not in (None, False) for name, _, value in conditions
    )


Elsewhere = Callable[[str, object], Mapping[str, str]]
"""Takes a mistyped argument and its value; returns settings that are no argument of the class, as they are passed."""


def documented(elsewhere: Elsewhere) -> Callable[[C], C]:
    """Decorate a dataclass of options: its docstring lists them, and the error for an unknown argument suggests one.

    The list is made of the texts of :func:`option`. The error is a ``TypeError``, as for every call with an unknown
    argument.

    Args:
        elsewhere: names settings that are passed in another way, for the suggestion.
    """

    def decorate(cls: C) -> C:
        init, names = vars(cls)["__init__"], [attribute.name for attribute in fields(cls) if attribute.init]
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nArgs:\n" + "\n".join(map(_line, options_of(cls)))

        @wraps(init)
        def checked(self: object, *arguments: Any, **values: Any) -> None:
            if unknown := [name for name in values if name not in names]:
                name, value = unknown[0], values[unknown[0]]
                remedy = _remedy(name, names, elsewhere(name, value)) or f"help({cls.__name__}) lists all"
                raise TypeError(f"{cls.__name__} has no argument '{name}'; {remedy}")
            init(self, *arguments, **values)

        setattr(cls, "__init__", checked)  # noqa: B010  # mypy refuses the assignment
        return cls

    return decorate


def _line(setting: Option) -> str:
    """Return the entry of an option in the docstring of its class."""
    default = "" if setting.default is None or setting.default is MISSING else f" (default {setting.default!r})"
    values = f" [{', '.join(setting.choices)}]" if setting.choices else ""
    return textwrap.fill(
        f"{setting.name}: {setting.about['help']}{values}{default}",
        width=116,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


USUAL_NAMES = {
    "lr": "learning_rate",
    "bs": "batch_size",
    "epochs": "num_epochs",
    "wd": "weight_decay",
    "lambda": "lbd",
    "loss": "jepa_loss_type",
    "max_len": "max_length",
    "max_seq_length": "max_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "base_model": "model_name",
    "train_data": "train_file",
    "val_set_size": "eval_split",
    "val_size": "eval_split",
    "eval_batch_size": "per_device_eval_batch_size",
    "accumulate_grad_batches": "grad_accum",
    "gradient_clipping": "max_grad_norm",
    "evals_per_epoch": "eval_steps",
    "saves_per_epoch": "save_steps",
    "save_dir": "output_dir",
    "adapter": "lora",
    "finetuning_type": "lora",
    "use_peft": "lora",
    "lora_target_modules": "lora_targets",
    "quantization_bit": "load_in_4bit",
    "flash_attn": "attn_implementation",
    "flash_attention": "attn_implementation",
    "train_on_inputs": "train_all",
    "no_cuda": "use_cpu",
    "packing": "row_length",
    "group_by_length": "train_sampling_strategy",
}
"""Names that other tools give to settings -> our name, where the letters alone would suggest another setting."""


def similar_settings(name: str, names: Collection[str]) -> list[str]:
    """Return the settings that a mistyped one may mean: by :data:`USUAL_NAMES`, or those of ``names`` like it."""
    return [usual] if (usual := USUAL_NAMES.get(name, name)) in names else similar_names(name, names)


def _remedy(name: str, names: list[str], others: Mapping[str, str]) -> str | None:
    """Return what to pass instead of an unknown argument; None if nothing is like it."""
    if name in others:
        return f"pass {others[name]}"
    near = similar_settings(name, [*names, *others])
    return question([similar if similar in names else others[similar] for similar in near]) or None


def short_repr(settings: DataclassInstance, defaults: DataclassInstance) -> str:
    """Represent a dataclass by the fields that differ from ``defaults``, as a call that makes an equal one."""
    values = {setting.name: getattr(settings, setting.name) for setting in fields(settings)}
    changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(defaults, name)]
    return f"{type(settings).__name__}({', '.join(changed)})"
