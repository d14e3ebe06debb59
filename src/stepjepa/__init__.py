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
    "data.bad_records": "BadRecords",
    "data.record": "Record",
    "data.sources": "read_records",
    "views.layouts": "ReadoutOptions layout",
    "views.sequences": "Pair Readout TokenSequence TokenizedRecord View hash_tokens main_sequence",
    "batch.collate": "Collator",
    "batch.record_collator": "RecordCollator",
    "batch.dataset": "Prepared",
    "batch.micro_batch": "Batch BatchRecords",
    "batch.prepare": "prepare",
    "models.encoded": "Encoded",
    "models.loading": "add_lora load_for_inference load_model",
    "models.probe": "EncodingChoice",
    "objectives.alignment": "Alignment ContrastiveDistance Cosine Covariance Distance InfoNCE L2 MSE SIGReg Variance "
    "equal_partners",
    "objectives.cached_pairs": "CachedPairs",
    "objectives.monitors": "effective_rank",
    "objectives.objective": "Losses Objective jepa_loss",
    "objectives.router": "RouterLoss",
    "objectives.term": "Context Term term",
    "objectives.text": "LMLoss PromptLoss SemanticTube",
    "objectives.embedding": "Embedder",
    "objectives.index": "Hit TextIndex",
    "objectives.fitted": "FittedHeads FittedMap",
    "objectives.inputs": "EmbedOptions",
    "objectives.jepa": "Jepa JepaLoss",
    "objectives.pair_embedding": "PairEmbedder",
    "objectives.setup": "set_up",
    "objectives.view_embeddings": "ReadoutPlace SideEmbeddings ViewEmbeddings",
    "store.record": "RunRecord",
    "training.trainer": "JepaTrainer",
    "evaluation.model_maps": "fit_linear_map fit_projection_heads",
    "evaluation.run": "evaluate",
    "evaluation.scores": "Scores",
    "running.run": "Run run",
    "study.comparison": "Comparison compare",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
find_old_modules()

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  # the names are strings, from the table above

if TYPE_CHECKING:
    # ``as`` the same name: for type checkers this is what makes a name public.
    from stepjepa.base.errors import UserError as UserError
    from stepjepa.batch.collate import Collator as Collator
    from stepjepa.batch.dataset import Prepared as Prepared
    from stepjepa.batch.micro_batch import Batch as Batch
    from stepjepa.batch.micro_batch import BatchRecords as BatchRecords
    from stepjepa.batch.prepare import prepare as prepare
    from stepjepa.batch.record_collator import RecordCollator as RecordCollator
    from stepjepa.config.jepa import JepaConfig as JepaConfig
    from stepjepa.config.lora import LoraSettings as LoraSettings
    from stepjepa.config.run import RunConfig as RunConfig
    from stepjepa.data.bad_records import BadRecords as BadRecords
    from stepjepa.data.record import Record as Record
    from stepjepa.data.sources import read_records as read_records
    from stepjepa.evaluation.model_maps import fit_linear_map as fit_linear_map
    from stepjepa.evaluation.model_maps import fit_projection_heads as fit_projection_heads
    from stepjepa.evaluation.run import evaluate as evaluate
    from stepjepa.evaluation.scores import Scores as Scores
    from stepjepa.models.encoded import Encoded as Encoded
    from stepjepa.models.loading import add_lora as add_lora
    from stepjepa.models.loading import load_for_inference as load_for_inference
    from stepjepa.models.loading import load_model as load_model
    from stepjepa.models.probe import EncodingChoice as EncodingChoice
    from stepjepa.objectives.alignment import L2 as L2
    from stepjepa.objectives.alignment import MSE as MSE
    from stepjepa.objectives.alignment import Alignment as Alignment
    from stepjepa.objectives.alignment import ContrastiveDistance as ContrastiveDistance
    from stepjepa.objectives.alignment import Cosine as Cosine
    from stepjepa.objectives.alignment import Covariance as Covariance
    from stepjepa.objectives.alignment import Distance as Distance
    from stepjepa.objectives.alignment import InfoNCE as InfoNCE
    from stepjepa.objectives.alignment import SIGReg as SIGReg
    from stepjepa.objectives.alignment import Variance as Variance
    from stepjepa.objectives.alignment import equal_partners as equal_partners
    from stepjepa.objectives.cached_pairs import CachedPairs as CachedPairs
    from stepjepa.objectives.embedding import Embedder as Embedder
    from stepjepa.objectives.fitted import FittedHeads as FittedHeads
    from stepjepa.objectives.fitted import FittedMap as FittedMap
    from stepjepa.objectives.index import Hit as Hit
    from stepjepa.objectives.index import TextIndex as TextIndex
    from stepjepa.objectives.inputs import EmbedOptions as EmbedOptions
    from stepjepa.objectives.jepa import Jepa as Jepa
    from stepjepa.objectives.jepa import JepaLoss as JepaLoss
    from stepjepa.objectives.monitors import effective_rank as effective_rank
    from stepjepa.objectives.objective import Losses as Losses
    from stepjepa.objectives.objective import Objective as Objective
    from stepjepa.objectives.objective import jepa_loss as jepa_loss
    from stepjepa.objectives.pair_embedding import PairEmbedder as PairEmbedder
    from stepjepa.objectives.router import RouterLoss as RouterLoss
    from stepjepa.objectives.setup import set_up as set_up
    from stepjepa.objectives.term import Context as Context
    from stepjepa.objectives.term import Term as Term
    from stepjepa.objectives.term import term as term
    from stepjepa.objectives.text import LMLoss as LMLoss
    from stepjepa.objectives.text import PromptLoss as PromptLoss
    from stepjepa.objectives.text import SemanticTube as SemanticTube
    from stepjepa.objectives.view_embeddings import ReadoutPlace as ReadoutPlace
    from stepjepa.objectives.view_embeddings import SideEmbeddings as SideEmbeddings
    from stepjepa.objectives.view_embeddings import ViewEmbeddings as ViewEmbeddings
    from stepjepa.running.run import Run as Run
    from stepjepa.running.run import run as run
    from stepjepa.store.record import RunRecord as RunRecord
    from stepjepa.study.comparison import Comparison as Comparison
    from stepjepa.study.comparison import compare as compare
    from stepjepa.training.trainer import JepaTrainer as JepaTrainer
    from stepjepa.views.layouts import ReadoutOptions as ReadoutOptions
    from stepjepa.views.layouts import layout as layout
    from stepjepa.views.sequences import Pair as Pair
    from stepjepa.views.sequences import Readout as Readout
    from stepjepa.views.sequences import TokenizedRecord as TokenizedRecord
    from stepjepa.views.sequences import TokenSequence as TokenSequence
    from stepjepa.views.sequences import View as View
    from stepjepa.views.sequences import hash_tokens as hash_tokens
    from stepjepa.views.sequences import main_sequence as main_sequence


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
