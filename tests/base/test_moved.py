"""Names of 0.2.0 can still be imported; each import says where the name is now."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

import stepjepa
from stepjepa.base.moved import MOVED

# What documents and examples of 0.2.0 imported, by module.
IMPORTED = {
    "stepjepa.errors": ("UserError",),
    "stepjepa.files": ("atomic_write", "existing_file", "read_json_object", "read_jsonl", "read_text", "write_json"),
    "stepjepa.config": ("JepaConfig", "CHOICES", "DEFAULTS", "SETTINGS"),
    "stepjepa.chat.predictors": ("add_predictor_tokens",),
    "stepjepa.evaluation.generation": ("Generator",),
    "stepjepa.experiments.statistics": ("paired_t", "spread"),
    "stepjepa.experiments.comparison": ("compare_runs",),
    "stepjepa.objectives.lm": ("LMLoss", "PromptLoss"),
    "stepjepa.objectives.tube": ("Tube",),
    "stepjepa.objectives.regularizers": ("SIGReg", "Variance", "Covariance"),
    "stepjepa.training.jepa_loss": ("JepaLoss",),
    "stepjepa.models.setup": ("set_up",),
}


@pytest.mark.parametrize("module", IMPORTED)
def test_what_documents_of_an_earlier_version_import_is_there_with_a_warning(module: str) -> None:
    if module != "stepjepa.config":
        sys.modules.pop(module, None)
    if module.startswith("stepjepa.experiments."):
        # The folder has another name, too.
        with pytest.warns(DeprecationWarning, match="stepjepa.experiments is now stepjepa.study"):
            sys.modules.pop("stepjepa.experiments", None)
            importlib.import_module("stepjepa.experiments")
    with pytest.warns(DeprecationWarning, match=f"{module}.* is now stepjepa"):
        for name in IMPORTED[module]:
            assert getattr(importlib.import_module(module), name) is not None


def test_every_old_module_has_a_module_of_today_and_none_that_is_there_is_hidden() -> None:
    for old, new in MOVED.items():
        assert find_spec(f"stepjepa.{new}") is not None, new
        with pytest.warns(DeprecationWarning, match=f"stepjepa.{old} is now stepjepa.{new}"):
            sys.modules.pop(f"stepjepa.{old}", None)
            importlib.import_module(f"stepjepa.{old}")


def test_renamed_and_removed_names_of_the_package() -> None:
    with pytest.warns(DeprecationWarning, match=r"stepjepa\.Tube is now stepjepa\.SemanticTube"):
        assert stepjepa.Tube is stepjepa.SemanticTube
    with pytest.raises(AttributeError, match=r"RecordStream is gone since 0\.3\.0: records are memory-mapped"):
        stepjepa.RecordStream  # noqa: B018  # the access is what fails


def test_a_line_of_import_names_the_users_file() -> None:
    code = "import warnings; warnings.simplefilter('error'); from stepjepa.errors import UserError"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "DeprecationWarning: stepjepa.errors is now stepjepa.base.errors" in done.stderr
    code = "import stepjepa.nowhere"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "No module named 'stepjepa.nowhere'" in done.stderr
