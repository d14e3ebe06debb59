"""What ``run.json`` says of the machine."""

from typing import Any

import pytest
import torch

from stepjepa.training.provenance import device_name, machine


def test_a_torch_for_gpus_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs it on Linux: there is an accelerator that it was made for, and none to be had."""

    def made_for(check_available: bool = False) -> Any:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", made_for)
    assert machine()["device"] == "cpu"


def test_an_accelerator_that_is_not_used_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert machine(use_cpu=True)["device"] == "cpu"
    # That backend has no names for its devices.
    assert machine()["device"] == device_name(torch.device("mps")) == "mps"
