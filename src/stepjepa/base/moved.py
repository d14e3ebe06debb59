"""Modules of 0.2.0 under their old names: importing one warns, and gives the names of the module of today."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "errors": "base.errors",
    "files": "base.files",
    "options": "config.option",
    "batch.layouts": "views.layouts",
    "batch.sampler": "batch.dataset",
    "batch.sequences": "views.sequences",
    "chat.predictors": "chat.special_tokens",
    "data.trained_prompts": "store.prompts",
    "evaluation.generation": "models.generation",
    "experiments": "study",
    "experiments.comparison": "study.comparison",
    "experiments.evaluated_run": "study.evaluated_run",
    "experiments.statistics": "study.statistics",
    "models.flex": "models.attention",
    "models.setup": "objectives.setup",
    "objectives.lm": "objectives.text",
    "objectives.regularizers": "objectives.alignment",
    "objectives.tube": "objectives.text",
    "run_folder": "store.folder",
    "training.card": "store.hub",
    "training.hub": "store.hub",
    "training.jepa_loss": "objectives.jepa",
}
"""Module of 0.2.0 -> module of today, both inside ``stepjepa``."""

RENAMED = {"Sequence": "TokenSequence", "Tube": "SemanticTube", "compare_runs": "compare"}
"""Name in 0.2.0 -> name of today."""

REMOVED = {"RecordStream": "records are memory-mapped: pass a file, or prepare(file, tokenizer, config)"}
"""Name in 0.2.0 that is gone -> what takes its place."""


class _Moved(ModuleType):
    """A module of 0.2.0: its names are looked up in the module of today."""

    def __getattr__(self, name: str) -> Any:
        home = MOVED[self.__name__.partition(".")[2]]
        if name.startswith("__"):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return getattr(importlib.import_module(f"stepjepa.{home}"), RENAMED.get(name, name))


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of :data:`MOVED` where there is no file of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "stepjepa" or name not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=any(old.startswith(f"{name}.") for old in MOVED))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name.partition(".")[2]]
        warnings.warn(f"{spec.name} is now stepjepa.{new}", DeprecationWarning, stacklevel=2)
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a module of today is imported when a name of it is asked for."""


def find_old_modules() -> None:
    """Let modules of 0.2.0 be imported under their old names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
