"""The LM loss of every model type that can be built small, beside the model's own ``model(input_ids, labels=...)``.

``PYTHONPATH=tests python tests/models/model_types.py`` tries all model types of the installed transformers, in some
minutes, and prints the table of docs/design.md; ``--write`` writes it there.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import page_tables
from stepjepa.batch.collate import Collator
from stepjepa.batch.costs import Costs
from stepjepa.models.attention import enable_trees
from stepjepa.models.lm_head import LMHead
from stepjepa.models.probe import choose_encoding, probe
from stepjepa.models.shrinking import VOCABULARY, shrink
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.text import LMLoss
from stepjepa.views.sequences import Ids, SampledRecord, TokenizedRecord

MARK = "model types"  # of the table on the page
MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Largest relative difference of the loss, and of the gradient (by its norm), that counts as rounding: losses and
# gradients of logits are computed in float32.
TOLERANCE = 1e-5

DIFFERS = "DIFFERS FROM ITS OWN LOSS"

# Their own loss does not shift the labels: those of a position are what it must predict.
UNSHIFTED = ["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"]
UNSHIFTED += ["trocr", "whisper"]

# What the default configuration of a model type lacks, or what its small copy needs.
CHANGES: dict[str, dict[str, Any]] = {
    "minicpm3": {"dim_model_base": 64},  # otherwise its scale is 1 in the small copy
    **{name: {"head_dim": 64} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "xmod": {"default_language": "en_XX"},
}


class Compared(NamedTuple):
    """The LM loss of one model type; of one that could not be compared, the reason alone."""

    model_type: str
    reason: str = ""
    encoding: str = ""
    changes_states: bool = False  # between decoder and LM head
    loss: float = 0.0  # relative difference from the model's own loss
    gradient: float = 0.0  # the same of its gradient, all weights as one vector

    @property
    def is_exact(self) -> bool:
        """Whether it differs from the model's own loss by rounding alone; not so where it could not be compared."""
        return not self.reason and max(self.loss, self.gradient) < TOLERANCE

    @property
    def kind(self) -> str:
        """The row of the table that the model type belongs to."""
        if self.reason:
            return self.reason.partition(" (")[0]
        if not self.is_exact:
            return DIFFERS
        read = "what the model makes of the decoder's states" if self.changes_states else "the decoder's states"
        return f"run as {'trees' if self.encoding == 'tree' else 'rows'}; the LM head reads {read}"


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings: default configurations and small copies of them cause many."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def make_model(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of a type's default configuration without weights, and a small copy of it with random ones.

    It is a decoder, where it can be one.
    """
    changes = CHANGES.get(model_type, {})
    config = AutoConfig.for_model(model_type, **changes)
    if getattr(config, "is_decoder", None) is False:
        config = AutoConfig.for_model(model_type, is_decoder=True, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return model, shrink(model).requires_grad_()


def records() -> list[TokenizedRecord]:
    """Three texts with a common beginning, of which the last tokens are trained."""
    ids = np.random.default_rng(3).integers(5, VOCABULARY - 1, 37).astype(np.int32)
    texts: list[Ids] = [ids[:17], np.r_[ids[:7], ids[17:23]], np.r_[ids[:7], ids[23:34]]]
    return [TokenizedRecord(text, np.arange(4, len(text) - 1, dtype=np.int32)) for text in texts]


def own_loss(model: nn.Module, *, shifted: bool) -> Tensor:
    """The model's own loss of each record by itself, as the mean over the labels of all.

    ``shifted``: whether the model reads a label one position in front of it, as nearly all do.
    """
    total, count = torch.zeros(()), 0
    for record in records():
        ids = torch.from_numpy(record.ids.astype(np.int64))[None]
        labels = torch.full_like(ids, -100)
        labels[0, record.labels + int(shifted)] = ids[0, record.labels + 1]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, use_cache=False)
        total, count = total + output.loss * len(record.labels), count + len(record.labels)
    return total / count


def our_loss(model: PreTrainedModel, encoding: str, *, segments: bool) -> Tensor:
    """The LM loss of the same records as one micro-batch, on trees where the model's states are exact there.

    By ``segments`` where the model runs them, under a mask where it does not.
    """
    if encoding == "tree":
        enable_trees(model, segments=segments)
    none = np.empty(0, np.int32)
    pad = max(getattr(model.config.get_text_config(), "pad_token_id", None) or 0, 0)
    options: dict[str, Any] = {"encoding": encoding, "row_length": 97, "pad_id": pad}
    if segments:
        options |= {"kernel": "calls", "costs": Costs(1.0, 1.0)}
    collator = Collator("separate", none, **options)
    return jepa_loss(model, collator(SampledRecord(record) for record in records()), Objective([LMLoss()])).loss


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of all weights, as one vector."""
    weights = list(model.parameters())
    each = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.cat(
        [
            torch.zeros(weight.numel()) if value is None else value.flatten()
            for weight, value in zip(weights, each, strict=True)
        ]
    )


def compare(model_type: str) -> Compared:
    """Loss and gradient of a small model of a type: ours beside its own."""
    with quiet():
        try:
            whole, model = make_model(model_type)
        except Exception as error:  # an architecture may raise anything
            return Compared(model_type, f"no small copy can be built ({_first_words(error)})")
        try:
            encoding, _ = choose_encoding(whole, "auto")
        except ValueError:
            return Compared(model_type, "refused: it sees later tokens")
        try:
            expected = own_loss(_in_double_precision(model), shifted=model_type not in UNSHIFTED)
        except Exception as error:  # the same
            return Compared(model_type, f"its own loss can't be computed ({_first_words(error)})")
        loss = our_loss(model, encoding, segments=encoding == "tree" and probe(whole).segments)
        actual, wanted = gradient(model, loss), gradient(model, expected)
    apart = [
        float(((one - other).norm() / other.norm()).detach()) for one, other in [(loss, expected), (actual, wanted)]
    ]
    return Compared(model_type, "", encoding, LMHead(model).around.before, *apart)


def _in_double_precision(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, in which small copies round by 1e-15 and not by 1e-4; in float32 where it can't run so."""
    try:
        with torch.no_grad():
            own_loss(model.double(), shifted=True)
    except RuntimeError:  # the grouped product over experts, for one
        model.float()
    return model


def _first_words(error: Exception) -> str:
    words = re.sub(r"[|<>\n]+", " ", str(error)).split()
    return f"{type(error).__name__}: {' '.join(words[:7])}"


def table(compared: Iterable[Compared]) -> str:
    """A Markdown table of model types by what came of them."""
    groups: dict[str, list[Compared]] = {}
    for each in compared:
        groups.setdefault(each.kind, []).append(each)
    lines = ["| what came of it | model types | largest difference of loss, of gradient |", "|---|---|---|"]
    for kind, members in sorted(groups.items(), key=lambda group: (bool(group[1][0].reason), -len(group[1]))):
        names = ", ".join(
            each.model_type + (f" ({reason})" if (reason := each.reason.partition(" (")[2].rstrip(")")) else "")
            for each in members
        )
        largest = "" if members[0].reason else ", ".join(f"{max(values):.0e}" for values in _differences(members))
        lines.append(f"| {kind} | **{len(members)}**: {names} | {largest} |")
    return "\n".join(lines)


def _differences(compared: Iterable[Compared]) -> Iterator[tuple[float, ...]]:
    return zip(*((each.loss, each.gradient) for each in compared), strict=True)


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="TYPE", help="some model types alone")
    parser.add_argument("--write", action="store_true", help="write the table into docs/design.md")
    args = parser.parse_args(arguments)
    chosen = args.model_types or MODEL_TYPES
    compared = []
    for number, model_type in enumerate(chosen, 1):
        compared.append(compare(model_type))
        print(f"{number} of {len(chosen)}: {compared[-1]}", file=sys.stderr, flush=True)
    exact = sum(each.is_exact for each in compared)
    summary = f"transformers {transformers.__version__}: {exact} of {len(chosen)} model types are compared and agree."
    text = f"{summary}\n\n{table(compared)}"
    print(text)
    if args.write:
        page_tables.write(MARK, text)


if __name__ == "__main__":
    main(sys.argv[1:])
