"""Fingerprints of model folders: of large files only some chunks are read, the first and the last among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.models.names import base_of_adapter
from stepjepa.running.export import ExportSettings, export
from stepjepa.store import fingerprint
from stepjepa.store.fingerprint import model_fingerprint, tell_changed_base
from stepjepa.store.hub import check_uploadable
from stepjepa.store.record import RunRecord, write_record


def changed(folder: Path, content: bytes, place: int) -> str:
    """The fingerprint of a folder one byte of whose weights is another."""
    (folder / "model.safetensors").write_bytes(content[:place] + b"x" + content[place + 1 :])
    return model_fingerprint(folder)


def test_of_a_large_file_evenly_spaced_chunks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_CHUNK", 2)
    monkeypatch.setattr(fingerprint, "_CHUNKS", 4)
    small, large = b"abcdefg", b"abcdefghijklmnopqrstuvw"  # 7 bytes are read as a whole, of 23 those from 0, 7, 14, 21
    (tmp_path / "model.safetensors").write_bytes(small)
    whole = model_fingerprint(tmp_path)
    assert all(changed(tmp_path, small, place) != whole for place in range(len(small)))
    (tmp_path / "model.safetensors").write_bytes(large)
    whole = model_fingerprint(tmp_path)
    noticed = [place for place in range(len(large)) if changed(tmp_path, large, place) != whole]
    assert noticed == [0, 1, 7, 8, 14, 15, 21, 22]
    # The size counts, too.
    (tmp_path / "model.safetensors").write_bytes(large[:14] + b"-" + large[14:])
    assert model_fingerprint(tmp_path) != whole


def test_an_adapter_that_names_itself_as_its_base_has_no_other(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{tmp_path}"}}', encoding="utf-8")
    assert len(model_fingerprint(tmp_path)) == 64


def test_the_base_of_an_adapter_is_that_of_its_training_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = tmp_path / "moved", tmp_path / "project"
    for place in (started, tmp_path / "elsewhere"):
        (place / "M").mkdir(parents=True)
        (place / "M" / "config.json").write_text(f'"{place.name}"')
    write_json(run / "adapter_config.json", {"base_model_name_or_path": "M"})
    write_json(run / "checkpoint-2" / "adapter_config.json", {"base_model_name_or_path": "M"})
    write_json(run / "run.json", {"directory": str(started)})
    found = set()
    # Elsewhere is another model of that name.
    for place in ("project", "elsewhere", "moved"):
        monkeypatch.chdir(tmp_path / place)
        assert base_of_adapter(str(run)) == base_of_adapter(f"{run}/checkpoint-2") == str(started / "M")
        with pytest.raises(UserError, match="the adapter's base model is a folder of this machine"):
            check_uploadable(run)
        found.add(model_fingerprint(run))
    assert len(found) == 1
    # On another machine the directory of the training is missing, and the path is what it says.
    started.rename(tmp_path / "gone")
    assert base_of_adapter(str(run)) == "M"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert base_of_adapter(str(run)) == "M" and model_fingerprint(run) not in found


def test_a_base_that_was_trained_anew_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, run = tmp_path / "M", tmp_path / "run"
    write_json(base / "config.json", 1)
    write_json(run / "adapter_config.json", {"base_model_name_or_path": str(base)})
    write_json(run / "checkpoint-2" / "adapter_config.json", {"base_model_name_or_path": str(base)})
    for recorded in (None, "a commit", model_fingerprint(base)):
        write_record(run, RunRecord(model=str(base), model_fingerprint=recorded))
        tell_changed_base(run, recorded)
    assert not capsys.readouterr().err
    write_json(base / "config.json", 2)
    for folder in (run, run / "checkpoint-2"):
        tell_changed_base(folder, recorded)
        told = f"note: the base model in {base} has changed since the adapter in {folder} was trained on it"
        assert told in capsys.readouterr().err
    # It is said in front of the export, whatever becomes of that.
    with pytest.raises(UserError):
        export(ExportSettings(model_path=str(run), output_dir=str(tmp_path / "out")))
    assert told.replace("/checkpoint-2", "") in capsys.readouterr().err
