"""stepjepa: train causal language models with LLM-JEPA and Step-JEPA objectives.

The names below are the Python face. They are loaded on first use, so that ``import stepjepa`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "JepaConfig": "config",
    "JepaTrainer": "training.trainer",
    "LoraSettings": "models.loading",
    "add_lora": "models.loading",
    "load_for_inference": "models.loading",
    "load_model": "models.loading",
    "Record": "data.records",
    "read_records": "data.records",
    "Forest": "forests.forest",
    "Segment": "forests.forest",
    "ForestBuilder": "forests.segments",
    "ForestCollator": "forests.collate",
    "Objective": "objectives.objective",
    "Cosine": "objectives.alignment",
    "InfoNCE": "objectives.alignment",
    "L2": "objectives.alignment",
    "MSE": "objectives.alignment",
    "UserError": "errors",
    "effective_rank": "objectives.monitors",
    "enable_forest": "models.attention",
    "forest_visibility": "models.attention",
    "forward": "models.embeddings",
    "prepare": "forests.preparation",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  # the names are strings, from the table above

if TYPE_CHECKING:
    from stepjepa.config import JepaConfig
    from stepjepa.data.records import Record, read_records
    from stepjepa.errors import UserError
    from stepjepa.forests.collate import ForestCollator
    from stepjepa.forests.forest import Forest, Segment
    from stepjepa.forests.preparation import prepare
    from stepjepa.forests.segments import ForestBuilder
    from stepjepa.models.attention import enable_forest, forest_visibility
    from stepjepa.models.embeddings import forward
    from stepjepa.models.loading import LoraSettings, add_lora, load_for_inference, load_model
    from stepjepa.objectives.alignment import L2, MSE, Cosine, InfoNCE
    from stepjepa.objectives.monitors import effective_rank
    from stepjepa.objectives.objective import Objective
    from stepjepa.training.trainer import JepaTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stepjepa' has no attribute '{name}'")
    return getattr(importlib.import_module(f"stepjepa.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
