"""stepjepa: train causal language models with LLM-JEPA and Step-JEPA objectives.

The names below are the Python API. They are loaded on first use, so that ``import stepjepa`` does not import torch.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from stepjepa.base.moved import REMOVED, RENAMED, find_old_modules

__version__ = "0.3.0"

_NAMES = {
    "config.jepa": "JepaConfig",
    "config.lora": "LoraSettings",
    "config.run": "RunConfig",
    "base.errors": "UserError",
    "data.records": "Record",
    "data.sources": "read_records",
    "views.layouts": "ReadoutOptions layout",
    "views.sequences": "Pair Readout TokenSequence TokenizedRecord View hash_tokens main_sequence",
    "batch.collate": "Collator",
    "batch.dataset": "Prepared",
    "batch.micro_batch": "Batch BatchRecords",
    "batch.prepare": "prepare",
    "models.encoded": "Encoded",
    "models.loading": "add_lora load_for_inference load_model",
    "objectives.alignment": "Alignment ContrastiveDistance Cosine Covariance Distance InfoNCE L2 MSE SIGReg Variance "
    "equal_partners",
    "objectives.monitors": "effective_rank",
    "objectives.objective": "Losses Objective jepa_loss",
    "objectives.router": "RouterLoss",
    "objectives.term": "Context Term term",
    "objectives.text": "LMLoss PromptLoss SemanticTube",
    "objectives.embedding": "Embedder",
    "objectives.index": "Hit TextIndex",
    "objectives.jepa": "Jepa JepaLoss",
    "objectives.reading": "SideEmbeddings ViewEmbeddings",
    "objectives.setup": "set_up",
    "training.trainer": "JepaTrainer",
    "evaluation.run": "Scores evaluate",
    "running.run": "Run run",
    "study.comparison": "Comparison compare",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
find_old_modules()

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  # the names are strings, from the table above

if TYPE_CHECKING:
    from stepjepa.base.errors import UserError
    from stepjepa.batch.collate import Collator
    from stepjepa.batch.dataset import Prepared
    from stepjepa.batch.micro_batch import Batch, BatchRecords
    from stepjepa.batch.prepare import prepare
    from stepjepa.config.jepa import JepaConfig
    from stepjepa.config.lora import LoraSettings
    from stepjepa.config.run import RunConfig
    from stepjepa.data.records import Record
    from stepjepa.data.sources import read_records
    from stepjepa.evaluation.run import Scores, evaluate
    from stepjepa.models.encoded import Encoded
    from stepjepa.models.loading import add_lora, load_for_inference, load_model
    from stepjepa.objectives.alignment import (
        L2,
        MSE,
        Alignment,
        ContrastiveDistance,
        Cosine,
        Covariance,
        Distance,
        InfoNCE,
        SIGReg,
        Variance,
        equal_partners,
    )
    from stepjepa.objectives.embedding import Embedder
    from stepjepa.objectives.index import Hit, TextIndex
    from stepjepa.objectives.jepa import Jepa, JepaLoss
    from stepjepa.objectives.monitors import effective_rank
    from stepjepa.objectives.objective import Losses, Objective, jepa_loss
    from stepjepa.objectives.reading import SideEmbeddings, ViewEmbeddings
    from stepjepa.objectives.router import RouterLoss
    from stepjepa.objectives.setup import set_up
    from stepjepa.objectives.term import Context, Term, term
    from stepjepa.objectives.text import LMLoss, PromptLoss, SemanticTube
    from stepjepa.running.run import Run, run
    from stepjepa.study.comparison import Comparison, compare
    from stepjepa.training.trainer import JepaTrainer
    from stepjepa.views.layouts import ReadoutOptions, layout
    from stepjepa.views.sequences import Pair, Readout, TokenizedRecord, TokenSequence, View, hash_tokens, main_sequence


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        warnings.warn(f"stepjepa.{name} is now stepjepa.{RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = RENAMED[name]
    if name in REMOVED:
        raise AttributeError(f"stepjepa.{name} is gone since 0.3.0: {REMOVED[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'stepjepa' has no attribute '{name}'")
    return getattr(importlib.import_module(f"stepjepa.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
