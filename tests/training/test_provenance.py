"""What ``run.json`` says of the machine."""

from typing import Any

import pytest
import torch

from stepjepa.training.provenance import machine


def test_a_torch_for_gpus_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs it on Linux: there is an accelerator that it was made for, and none to be had."""

    def made_for(check_available: bool = False) -> Any:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", made_for)
    assert machine()["device"] == "cpu"
