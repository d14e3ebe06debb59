"""Names of models: hub ids and paths are told apart before a hub is asked."""

from pathlib import Path

import pytest

from stepjepa.base.errors import UserError
from stepjepa.models.names import check_model_name, is_hub_id


@pytest.mark.parametrize("name", ["runs/regulr", "nowhere/at/all", "prset:tiny"])
def test_what_would_be_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "regular").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for known in ("gpt2", "Qwen/Qwen2.5-0.5B"):
        assert is_hub_id(known)
        check_model_name(known)
    check_model_name("runs/regular")
    for path in ("preset:tiny", "runs/regular", "./one", "~/one", name):
        assert not is_hub_id(path)
    with pytest.raises(UserError, match=f"^{name}: no such model folder; check the path$"):
        check_model_name(name)
    with pytest.raises(UserError, match=rf"^{name}: no such model folder; check the path \(presets are such as"):
        check_model_name(name, untrained=True)
    with pytest.raises(UserError, match=r"^preset:tiny: a preset has random weights; name a trained model"):
        check_model_name("preset:tiny")


def test_a_file_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").write_text("")
    assert not is_hub_id("gpt2")
    with pytest.raises(UserError, match=r"^gpt2: is a file; name the folder of a model$"):
        check_model_name("gpt2")
