"""Where a model is exported to: never over the model itself, and no place that can't be replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepjepa.base.errors import UserError
from stepjepa.running.export import ExportSettings, export


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def refusal(model: Path, output: Path) -> str:
    with pytest.raises(UserError) as error:
        export(ExportSettings(model_path=str(model), output_dir=str(output)))
    assert (model / "config.json").is_file()
    return str(error.value)


def test_nobody_is_told_to_empty_the_folder_of_the_model(model: Path) -> None:
    link = model.parent / "link"
    link.symlink_to(model)
    for folder in (model, model.parent, link):
        assert refusal(model, folder) == f"{folder}: holds the model to be exported; name another `output_dir`"


@pytest.mark.parametrize("why", ["mount", "read-only"])
def test_a_folder_that_can_not_be_replaced_is_named_before_any_work(
    why: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    if why == "mount":
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    else:
        # Whoever runs the tests may be allowed to write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "disk")
    assert "out: can't be replaced as a whole, " in (told := refusal(model, tmp_path / "disk" / "out"))
    assert told.endswith("; name a new folder in it")
    assert not [*(tmp_path / "disk" / "out").iterdir()]
