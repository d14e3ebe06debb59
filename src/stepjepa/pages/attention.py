"""The record inspector: what some records of the training file become, who sees whom, and where embeddings are read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, bad_records, iterate_records
from stepjepa.errors import UserError, one_line, visible
from stepjepa.files import fingerprint
from stepjepa.inspection.palette import COLOURS, visible_text
from stepjepa.pages.markup import environment, json_block
from stepjepa.pages.material import Run
from stepjepa.pages.section import Section

if TYPE_CHECKING:
    from stepjepa.inspection.record import Inspection

RECORDS = 8
"""Records of the file that are shown, the first ones."""

LONGEST = 1500
"""Most tokens that are shown of a record: every one of them is an element of the page."""

CHOICES_OF_K = (1, 2, 3)
"""Numbers of predictor tokens to choose from, beside the run's own."""

TITLE = "Record inspector"


def inspector_section(run: Run, number: int = 1) -> Section | None:
    """The first records of a run's training file, token by token, as that run has seen them.

    The trees are those of :func:`stepjepa.inspection.record.inspect_records`, with the tokenizer of the run folder; no
    weights are loaded and nothing is fetched.

    Args:
        run: as read from its folder.
        number: of the inspector on the page, counted from 1; each needs names of its own.

    Returns:
        A section that says what is missing where the file is gone or has changed since, or where the tokenizer can't
        be loaded; None where ``run.json`` does not tell what was trained on.
    """
    anchor = "inspector" if number == 1 else f"inspector-{number}"
    jepa, data = run.run.get("jepa"), run.run.get("data")
    if not isinstance(jepa, dict) or not isinstance(data, dict) or not data:
        return None
    template = environment().get_template("inspector.html")
    context: dict[str, Any] = {"run": visible(run.name), "name": anchor, "problem": None, "notes": [], "data": ""}
    context["colours"] = COLOURS
    try:
        config = _config(jepa)
        described = _describe(run, config, context["notes"])
        context |= {"views": config.uses_views, "mode": config.mode, "layout": config.layout}
        context["file"] = visible(str(described.pop("file")))
        context["data"] = Markup(json_block(f"{anchor}-data", described))
    except UserError as error:
        context["problem"] = one_line(error)
        return Section(anchor, TITLE, template.render(context))
    parts = files("stepjepa.pages") / "templates"
    script, style = ((parts / f"inspector.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    return Section(anchor, TITLE, template.render(context), script, _colours() + style)


def _config(jepa: dict[str, Any]) -> JepaConfig:
    try:
        return JepaConfig(**jepa)
    except (TypeError, ValueError) as error:
        raise UserError(f"the objective in run.json can't be read ({error}); train again") from None


def _describe(run: Run, config: JepaConfig, notes: list[str]) -> dict[str, Any]:
    """What the script draws, and the file that it is from.

    Raises:
        UserError: file or tokenizer are missing or wrong.
    """
    path, flags = _data_file(run)
    bad = bad_records(flags.bad_records or "error")
    some = list(islice(iterate_records(path, bad), RECORDS))
    choices = sorted({*CHOICES_OF_K, config.predictors or 0}) if config.uses_views else [config.predictors or 0]
    tokenizer = _tokenizer(run.folder, config, max(choices))
    records = []
    for index, record in enumerate(some):
        try:
            found = dict(zip(choices, _inspections(record, tokenizer, config, choices), strict=True))
        except UserError as error:
            notes.append(one_line(error))
            continue
        if len(found[choices[0]].tokens) > LONGEST:
            notes.append(f"Record {index} has more than {LONGEST:,} tokens; 'stepjepa inspect' shows it.")
            continue
        records.append(
            {"index": index, "line": record.line, "trees": {count: _tree(each) for count, each in found.items()}}
        )
    if not records:
        raise UserError(" ".join(["there is no record to show.", *notes]), path=path)
    return {"records": records, "choices": choices, "own": config.predictors or 0, "file": path}


def _data_file(run: Run) -> tuple[Path, argparse.Namespace]:
    """The file that the run read its training records from, and the flags that it was read with.

    Raises:
        UserError: it is not there any more, or holds something else now.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--train_file", "--data_file", "--bad_records"):
        parser.add_argument(flag)
    # Runs of earlier versions have only the command as it was typed.
    given = run.run.get("arguments") or run.run.get("command") or []
    known = {name: value for name, value in run.run["data"].items() if name in ("train", "data")}
    if not known or not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise UserError("run.json does not say which file was trained on")
    part, expected = next(iter(known.items()))
    try:
        flags = parser.parse_known_args(given)[0]
    except argparse.ArgumentError as error:
        raise UserError(f"the command in run.json can't be read ({error}); train again") from None
    named = getattr(flags, f"{part}_file") or expected["file"]
    path = next((each for each in _places(run, named) if each.is_file()), None)
    if path is None:
        raise UserError(
            f"the training file {named} is not there; call 'stepjepa report' in the folder that the run was started in"
        )
    if not _same(path, expected):
        raise UserError("is not the file any more that was trained on; its records are not shown", path=path)
    return path, flags


def _places(run: Run, named: str) -> Iterator[Path]:
    """Where a file may lie that a run named: seen from where it was started, or from here."""
    directory = run.run.get("directory")
    if isinstance(directory, str) and directory:
        yield Path(directory) / named
    yield Path(named)


def _same(path: Path, expected: dict[str, Any]) -> bool:
    if "sha256" in expected:
        return fingerprint(path) == expected["sha256"]
    from stepjepa.training.provenance import identify_stream

    return all(expected.get(name) == value for name, value in identify_stream(str(path)).items() if name != "file")


def _tokenizer(folder: Path, config: JepaConfig, most: int) -> Any:
    from stepjepa.models.loading import load_tokenizer
    from stepjepa.text.plain_template import add_plain_tokens
    from stepjepa.text.predictors import add_predictor_tokens

    tokenizer = load_tokenizer(str(folder))
    if config.plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, most)
    return tokenizer


def _inspections(record: Record, tokenizer: Any, config: JepaConfig, choices: list[int]) -> Iterator[Inspection]:
    from stepjepa.inspection.record import inspect_records

    for count in choices:
        yield inspect_records([record], 0, tokenizer, replace(config, predictors=count))


def _tree(inspection: Inspection) -> dict[str, Any]:
    """One tree as the script takes it.

    Of each token: text, id, branch, position, what it must predict (null for nothing), what is read there, the first
    token that it sees, and one past the last that sees it.
    """
    from stepjepa.inspection.view import passing

    branches = [
        {
            "kind": branch.kind,
            "name": passing(inspection, branch),
            "where": _where(branch.parent, isolated=branch.isolated),
            "end": branch.end,
        }
        for branch in inspection.branches
    ]
    tokens = [
        [
            visible_text(token.text),
            token.id,
            token.branch,
            token.position,
            ", ".join(map(visible_text, token.label_texts)) or None,
            ", ".join(token.readouts),
            token.start,
            token.end,
        ]
        for token in inspection.tokens
    ]
    return {"branches": branches, "tokens": tokens}


def _where(parent: int | None, *, isolated: bool) -> str:
    if parent is None:
        return "begins a text"
    return f"goes on behind branch {parent}" + (" and sees only itself" if isolated else "")


def _colours() -> str:
    """Two shades of each branch's colour, taken in turn by its tokens; its edge has the first."""
    lines = []
    for kind, colours in COLOURS.items():
        lines.append(f".inspector-branch.inspector-{kind} {{ border-color: {colours.shades[0]}; }}")
        for place, shade in zip(("odd", "even"), colours.shades, strict=True):
            lines.append(f".inspector-{kind} .inspector-token:nth-of-type({place}) {{ background: {shade}; }}")
    return "\n".join([*lines, ""])
