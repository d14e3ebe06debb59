"""Flags that describe a training run, and the file of ``--config``. Free of torch."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.cli.parser import Parser, as_arguments
from stepjepa.cli.published import translate_train
from stepjepa.config.flat_file import line_of, read_flat
from stepjepa.config.option import Option, option
from stepjepa.config.run import FLAT, GROUPS, OF_TRAINERS, PASSED_OBJECTS, WRITTEN, RunConfig
from stepjepa.config.shortcuts import JEPA, SHORTCUTS, TERMS, flat_objective
from stepjepa.config.trainer import WITHOUT_EFFECT, trainer_options
from stepjepa.running.repeat import is_record, recorded_settings

OBJECTIVE = "objective (neither --regular nor --step_jepa means LLM-JEPA)"

_SHARED = ("train_file", "dataset", "columns", "bad_records", "model_name", "chat_template", "trust_remote_code")

RECORDS_MODEL_OBJECTIVE = (
    *(setting for setting in WRITTEN if setting.name in _SHARED),
    *(*SHORTCUTS, *JEPA, *TERMS),
)
"""Settings of a run that ``inspect`` and ``verify`` have, too."""


@dataclass
class JsonFlags:
    """JSON output."""

    json: bool = option(False, "one JSON document on standard output; lines go to standard error")


@dataclass
class DetailsFlags:
    """Detailed output."""

    details: bool = option(False, "print every figure; otherwise only the most important ones")


def add_run(parser: Parser) -> None:
    """Add the flags of a whole run, under the headings of ``GROUPS`` in their order."""
    for group in GROUPS:
        parser.add_argument_group(OBJECTIVE if group == "objective" else group)
    parser.add_options((*SHORTCUTS, *WRITTEN), OBJECTIVE, named_only=True)


def add_records_model_objective(parser: Parser) -> None:
    """Add the flags of training records, model and objective."""
    parser.add_options(RECORDS_MODEL_OBJECTIVE, OBJECTIVE, named_only=True)


def run_config(args: argparse.Namespace, options: Iterable[Option] = (*SHORTCUTS, *WRITTEN)) -> RunConfig:
    """Return the configuration that the parsed flags of ``options`` describe."""
    values = {setting.flag: getattr(args, setting.flag) for setting in options if hasattr(args, setting.flag)}
    return RunConfig.from_flat({**values, **getattr(args, "trainer", {})}, note)


def settings_of_earlier_run(arguments: Sequence[str], jepa: JsonObject) -> JsonObject:
    """Return the settings of a run of 0.2.0, by the names of their flags, not checked yet.

    Args:
        arguments: the recorded arguments of ``stepjepa train``.
        jepa: the recorded objective; the arguments do not determine it, since earlier versions had another default.
    """
    parser = Parser(prog="stepjepa train")
    parser.takes_others = True
    add_run(parser)
    args, others = parser.parse_known_args(translate_train(arguments)[0])
    objective = {setting.flag for setting in (*SHORTCUTS, *JEPA, *TERMS)}
    values = {setting.flag: getattr(args, setting.flag) for setting in WRITTEN if hasattr(args, setting.flag)}
    values = {
        name: value for name, value in values.items() if name not in objective and not FLAT[name].about.get("launch")
    }
    # It split a file by record.
    split = {"split_by": "record"} if "data_file" in values else {}
    return {**values, **split, **trainer_values(parser, others), **flat_objective(jepa)}


# -- a file of flags ---------------------------------------------------------------------------------------------------


def arguments_of_file(parser: Parser, path: str, typed: Sequence[str], *, trusted: bool = False) -> list[str]:
    """Read a YAML file of flags as arguments.

    The file of a run folder repeats its run, see ``repeat.recorded_settings``.

    Args:
        parser: of the command.
        path: the file.
        typed: the command line as typed; its flags override those of the file.
        trusted: code that the file names may be run.

    Raises:
        UserError: the file is wrong, or a line of it, whose number is named; or it names code that is not trusted.
    """
    overridden = {parser.destination(argument.partition("=")[0]) for argument in typed} - {None}
    arguments = list[str]()
    for name, value in (recorded_settings(path, trusted=trusted) if is_record(path) else read_flat(path)).items():
        try:
            if name == "config":
                raise UserError("'config' is no setting of a file; leave it out")
            if name in (*PASSED_OBJECTS, *OF_TRAINERS) and isinstance(value, dict):
                RunConfig(objects={name: value}).check_required()
            words = as_arguments({name: value})
            trainer_values(parser, parser.parse_known_args(translate_train(words)[0])[1])
        except (ValueError, TypeError) as error:  # json's own for what holds itself
            raise UserError(str(error), path=path, line=line_of(path, name)) from None
        if parser.destination(f"--{name}") not in overridden:
            arguments += words
    return arguments


# -- fields of transformers.TrainingArguments --------------------------------------------------------------------------


@cache
def _trainer_parser() -> Parser:
    """Return a parser of the fields of ``TrainingArguments``; its result holds only the fields that are named."""
    parser = Parser(add_help=False, prog="stepjepa train")
    parser.takes_others = True
    for setting in trainer_options().values():
        parser.add_options([setting], "transformers.TrainingArguments", named_only=True)
        if setting.default is True:
            parser.add_switch_off(setting.name)
    return parser


def trainer_flags() -> list[str]:
    """Return the flags of ``TrainingArguments``, with dashes; imports transformers."""
    return _trainer_parser().flags()


def trainer_values(parser: Parser, rest: Sequence[str]) -> JsonObject:
    """Return the fields of ``TrainingArguments`` among arguments that ``parser`` does not know; refuse others."""
    if not rest:
        return {}
    parsed, unknown = _trainer_parser().parse_known_args(rest)
    if unknown:
        if (name := unknown[0].partition("=")[0].removeprefix("--")) in WITHOUT_EFFECT:
            parser.error(f"--{name}: it has no effect here; leave it out")
        parser.refuse(unknown, trainer_flags())
    if "hub_token" in parsed:
        # Before any message can show it.
        parser.error("--hub_token: set HF_TOKEN in the environment; leave it out")
    return {**vars(parsed)}


def more_help(train_parser: Parser) -> str:
    """Return help on the flags that only ``TrainingArguments`` has, for ``--help_all``."""
    parser = Parser(add_help=False, usage=argparse.SUPPRESS)
    train_flags = {*train_parser.flags()}
    parser.add_options(
        [setting for setting in trainer_options().values() if f"--{setting.name}" not in train_flags],
        "transformers.TrainingArguments",
    )
    published = "\nFlags of the published scripts are translated: docs/published.md has a table of them.\n\n"
    return published + parser.format_help()
