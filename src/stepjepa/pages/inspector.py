"""The record inspector: tokens of the first training records, who sees whom, and where embeddings are read."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepjepa.config import JepaConfig
from stepjepa.data.records import bad_records
from stepjepa.data.sources import iterate_records
from stepjepa.errors import UserError, one_line, visible
from stepjepa.files import fingerprint
from stepjepa.inspection.view import COLOURS, passing, visible_text
from stepjepa.pages.render import Section, json_block, render
from stepjepa.pages.runs import Run

if TYPE_CHECKING:
    from stepjepa.inspection.record import Inspection

RECORDS = 8
"""Records that are shown, from the beginning of the file."""

LONGEST = 1500
"""Tokens of the longest record that is shown: each is an element of the page."""

CHOICES_OF_K = (1, 2, 3)
"""Numbers of predictor tokens that a reader can choose, beside the run's own."""


def inspector_section(run: Run) -> Section | None:
    """The first training records of a run, token by token, by its own tokenizer; no weights are loaded.

    Returns:
        A section, which says what is missing where the file is gone or has changed or the tokenizer can't be loaded;
        None where ``run.json`` does not name the file that was trained on.
    """
    jepa, data = run.get("jepa"), run.get("data")
    if not isinstance(jepa, dict) or not isinstance(data, dict) or not data:
        return None
    notes: list[str] = []
    values: dict[str, Any] = {"run": visible(run.name), "problem": None, "data": Markup(""), "notes": notes}
    script = None
    try:
        config = _read_config(jepa)
        path, flags = _training_file(run)
        described = _describe(run, config, path, flags, notes)
        values |= {"config": config, "file": visible(str(path)), "colours": COLOURS}
        values["data"], script = json_block("inspector-data", described), "inspector.js"
    except UserError as error:
        values["problem"] = one_line(error)
    return Section("inspector", "Record inspector", render("inspector.html", **values), script)


def _read_config(jepa: dict[str, Any]) -> JepaConfig:
    try:
        return JepaConfig(**jepa)
    except (TypeError, ValueError) as error:
        raise UserError(f"the objective in run.json can't be read ({error}); train again") from None


def _training_file(run: Run) -> tuple[Path, argparse.Namespace]:
    """The file that the run was trained on, and the flags that it was read with.

    Raises:
        UserError: it is gone, or has changed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--train_file", "--data_file", "--bad_records"):
        parser.add_argument(flag)
    parser.add_argument("--columns", nargs="+")
    # Runs of earlier versions have only the command as it was typed.
    given = run.get("arguments") or run.get("command") or []
    part = next((name for name in ("train", "data") if isinstance(run.get("data", name), dict)), None)
    if part is None or not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise UserError("run.json does not say which file was trained on")
    try:
        flags = parser.parse_known_args(given)[0]
    except argparse.ArgumentError as error:
        raise UserError(f"the command in run.json can't be read ({error}); train again") from None
    expected = run.get("data", part)
    if "datasets" in expected:
        raise UserError("records of several data sets are not shown; look at one with 'stepjepa inspect'")
    named = str(getattr(flags, f"{part}_file") or expected.get("file"))
    # As seen from where the run was started, or from here.
    places = [Path(str(run.get("directory") or ".")) / named, Path(named)]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise UserError(
            f"the training file {named} is not there; call 'stepjepa report' in the folder that the run was started in"
        )
    if fingerprint(path) != expected.get("sha256"):
        raise UserError("has changed since it was trained on; its records are not shown", path=path)
    return path, flags


def _describe(run: Run, config: JepaConfig, path: Path, flags: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    """The records for the script: for each number of predictor tokens the tree of a record.

    Raises:
        UserError: file or tokenizer are missing or wrong.
    """
    from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
    from stepjepa.inspection.record import inspect_records
    from stepjepa.models.loading import load_tokenizer

    some = list(islice(iterate_records(path, bad_records(flags.bad_records or "error"), flags.columns), RECORDS))
    own = config.predictors or 0
    choices = sorted({*CHOICES_OF_K, own}) if config.uses_views else [own]
    tokenizer = load_tokenizer(str(run.folder))
    if config.plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, max(choices))
    records = []
    for index, record in enumerate(some):
        try:
            trees = {
                count: _tree(inspect_records([record], 0, tokenizer, replace(config, predictors=count)))
                for count in choices
            }
        except UserError as error:
            notes.append(one_line(error))
            continue
        if len(trees[choices[0]]["tokens"]) > LONGEST:
            notes.append(f"Record {index} has more than {LONGEST:,} tokens; 'stepjepa inspect' shows it.")
            continue
        records.append({"index": index, "line": record.line, "trees": trees})
    if not records:
        raise UserError(" ".join(["there is no record to show.", *notes]), path=path)
    return {"records": records, "choices": choices, "own": own}


def _tree(inspection: Inspection) -> dict[str, Any]:
    """One tree for the script.

    Of each token: text, id, branch, position, what it must predict (null: nothing), what is read there, the first
    token that it sees, and one past the last that sees it.
    """
    branches = []
    for branch in inspection.branches:
        where = "begins a text" if branch.parent is None else f"goes on behind branch {branch.parent}"
        where += " and sees only itself" if branch.isolated else ""
        name = passing(inspection, branch)
        branches.append({"kind": branch.kind, "name": name, "where": where, "end": branch.end})
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
