"""Short names for arms: what differs between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What is plain without its name, and what has a shorter one.
_BARE = ("mode", "layout", "jepa_loss_type")
_SHORT = {"predictors": "K"}
_FIRST = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")


def arm_names(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Short names: the mode, and what differs between arms that have it.

    Args:
        settings: of arms, no two of them equal.

    Returns:
        One name each, no two of them equal.
    """
    order = dict.fromkeys([*_FIRST, *(key for each in settings for key in each)])
    values = {key: {json_text(each[key]) for each in settings if key in each} for key in order}
    differing = [key for key in order if key == "mode" or len(values[key]) > 1]
    names = [" ".join(filter(None, (_part(key, each[key]) for key in differing if key in each))) for each in settings]
    for place, name in enumerate(names):
        if names.count(name) > 1:
            # Of two such arms one lacks a setting, as those of an older version may.
            rare = [key for key in order if not all(key in each for each in settings) and key in settings[place]]
            names[place] = " ".join([name, *(f"{key}={json_text(settings[place][key])}" for key in rare)])
    return names


def _part(key: str, value: Any) -> str:
    if value is False:
        return ""
    if value is True:
        return key
    if key == "model":
        value = Path(value).name
    shown = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json_text(value)
    if not shown.strip() or shown != " ".join(shown.split()):
        shown = json_text(shown)
    return shown if key in _BARE else f"{_SHORT.get(key, key)}={shown}"


def json_text(value: Any) -> str:
    """One text for equal settings, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
