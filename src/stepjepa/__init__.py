"""stepjepa: train causal language models with LLM-JEPA and Step-JEPA objectives.

The names below are the Python face. They are loaded on first use, so that ``import stepjepa`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "JepaConfig": "config",
    "JepaTrainer": "trainer",
    "LoraSettings": "model",
    "add_lora": "model",
    "load_for_inference": "model",
    "load_model": "model",
    "Record": "records",
    "read_records": "records",
    "Forest": "forest",
    "Segment": "forest",
    "ForestBuilder": "segments",
    "ForestCollator": "collate",
    "Objective": "objective",
    "Cosine": "alignment",
    "InfoNCE": "alignment",
    "L2": "alignment",
    "MSE": "alignment",
    "UserError": "errors",
    "effective_rank": "monitors",
    "enable_forest": "attention",
    "forest_visibility": "attention",
    "forward": "embeddings",
    "prepare": "preparation",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  # the names are strings, from the table above

if TYPE_CHECKING:
    from stepjepa.alignment import L2, MSE, Cosine, InfoNCE
    from stepjepa.attention import enable_forest, forest_visibility
    from stepjepa.collate import ForestCollator
    from stepjepa.config import JepaConfig
    from stepjepa.embeddings import forward
    from stepjepa.errors import UserError
    from stepjepa.forest import Forest, Segment
    from stepjepa.model import LoraSettings, add_lora, load_for_inference, load_model
    from stepjepa.monitors import effective_rank
    from stepjepa.objective import Objective
    from stepjepa.preparation import prepare
    from stepjepa.records import Record, read_records
    from stepjepa.segments import ForestBuilder
    from stepjepa.trainer import JepaTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stepjepa' has no attribute '{name}'")
    return getattr(importlib.import_module(f"stepjepa.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
