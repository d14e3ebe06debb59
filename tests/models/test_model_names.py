"""Names of models: hub ids and paths are told apart before a hub is asked."""

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from stepjepa.base.errors import UserError
from stepjepa.models.names import check_base, check_model_name, check_trained, is_hub_id


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


def test_a_hub_out_of_reach_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library tries again for more than a minute, with two lines for each try."""

    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("stepjepa.models.names.getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told = r"^org/model: neither a folder here nor in the hub's cache, and there is no way to huggingface.co; check"
    for check in (check_base, check_trained):
        with pytest.raises(UserError, match=told):
            check("org/model")
    check_base("no name")  # the library says so
    with monkeypatch.context() as patch:
        patch.setattr("stepjepa.models.names.getproxies", lambda: {"https": "proxy:80"})
        check_base("org/model")
    cached = tmp_path / "models--org--model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    check_base("org/model")
