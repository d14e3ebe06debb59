"""Which commit of a model of the hub a run was trained from, as the hub's cache on this machine has it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from stepjepa.store.fingerprint import hub_commit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_commit_is_that_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    assert hub_commit("some/model") == COMMIT
    assert hub_commit("another/model") is None
    for name in ("preset:tiny", "LlamaForCausalLM", "/a/folder/that/is/gone"):
        assert hub_commit(name) is None
