"""Hold out test records so that no question of the test file is one of the training file."""

import json
import random
from collections.abc import Sequence

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.data.questions import question_hashes
from stepjepa.data.records import parse_record


def hold_out(
    records: Sequence[JsonObject], size: int, seed: int, path: object = "<memory>"
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Divide records into training and test records, each in the order of ``records``.

    Records with the same question (ignoring case and white space) or the same ``group`` stay together. Such sets of
    records are drawn at random; one that is larger than the number still missing stays in the training records.

    Args:
        records: records with ``messages``, and perhaps ``group``.
        size: wanted number of test records.
        seed: the same seed draws the same records.
        path: file of the records, for the error.

    Returns:
        The training records, and at most ``size`` test records.

    Raises:
        UserError: no record would be left to train on, or every group is larger than ``size``.
    """
    if size >= len(records):
        fault = f"`test_size`: expected fewer than the {counted(len(records), 'record')} that could be kept, got {size}"
        raise UserError(f"{fault}; hold out fewer", path=path)
    groups = _group(records)
    order = list(range(len(groups)))
    random.Random(seed).shuffle(order)
    chosen = set[int]()
    for number in order:
        if len(chosen) + len(groups[number]) <= size:
            chosen.update(groups[number])
    if not chosen:
        smallest = min(map(len, groups))
        fault = f"`test_size`: {counted(size, 'record')} can't be held out"
        if len(groups) == 1:
            remedy = "add records with another question, or leave `test_file` out"
            raise UserError(f"{fault}, since all have the same question, or share its group; {remedy}", path=path)
        remedy = f"hold out {smallest} or more, or remove repeated rows"
        raise UserError(f"{fault}, since at least {smallest} have the same question; {remedy}", path=path)
    parts: tuple[list[JsonObject], list[JsonObject]] = ([], [])
    for number, record in enumerate(records):
        parts[number in chosen].append(record)
    return parts


def _group(records: Sequence[JsonObject]) -> list[list[int]]:
    """Return groups of indices of records that stay together, in the order of the file."""
    parents = list(range(len(records)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    first = dict[tuple[str, object], int]()  # key that records share -> the first record with it
    for number, record in enumerate(records):
        question = question_hashes(parse_record(record, line=number + 1).messages)["normalised"]
        keys: list[tuple[str, object]] = [("question", question)]
        if "group" in record:
            group = record["group"]
            # A list or an object of JSON is no key of a dict.
            keys += [("group", json.dumps(group, sort_keys=True) if isinstance(group, list | dict) else group)]
        for key in keys:
            earlier, later = sorted((root(first.setdefault(key, number)), root(number)))
            parents[later] = earlier
    groups = dict[int, list[int]]()
    for number in range(len(records)):
        groups.setdefault(root(number), []).append(number)
    return list(groups.values())
