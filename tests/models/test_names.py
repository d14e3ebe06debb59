"""What a name of a model means, before anything is loaded or asked of the hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepjepa.errors import UserError
from stepjepa.models.presets import is_hub_id, refuse_missing


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "regular").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("gpt2", True),
        ("Qwen/Qwen2.5-0.5B", True),
        ("preset:tiny", False),
        ("runs/regular", False),
        ("runs/regulr", False),
        ("./one", False),
        ("~/one", False),
        ("one/two/three", False),
    ],
)
def test_what_would_be_asked_of_the_hub(name: str, hub: bool) -> None:
    assert is_hub_id(name) is hub


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/regulr", "runs/regulr: no such model folder; did you mean runs/regular?"),
        ("runs/unlike", "runs/unlike: no such model folder; check the path"),
        ("nowhere/at/all", "nowhere/at/all: no such model folder; check the path"),
        ("preset:tny", "no model 'preset:tny', and no hub id holds a colon; did you mean preset:tiny?"),
    ],
)
def test_a_missing_folder_is_not_looked_for_elsewhere(name: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        refuse_missing(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B", "runs/regular"])
def test_what_may_be_there_is_left_to_the_library(name: str) -> None:
    refuse_missing(name)
