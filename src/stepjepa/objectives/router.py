"""The load-balancing loss of a mixture of experts: keeps the router from sending all tokens to a few experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stepjepa.models.architecture import base_model, has_experts
from stepjepa.objectives.precision import without_autocast
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.micro_batch import Batch
    from stepjepa.config.jepa import JepaConfig
    from stepjepa.models.encoded import Encoded

# Names of the coefficient in the configurations of transformers.
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class Router(NamedTuple):
    """The load-balancing loss of a model type."""

    coefficient: float  # its weight beside the LM loss
    name: str  # of the coefficient in the configuration
    top_k: int  # experts that a token is sent to


def router_of(model: nn.Module) -> Router | None:
    """Return the load-balancing loss of a causal language model or its PEFT wrapper; None if its type has none.

    A type has one if its configuration has a coefficient and can ask for router logits (``output_router_logits``).
    """
    base = base_model(model)
    config = base.config.get_text_config()
    if not has_experts(base) or not hasattr(config, "output_router_logits"):
        return None
    for name in COEFFICIENTS:
        # DBRX has its coefficient in a nested configuration, and under this name in the model.
        coefficient = getattr(config, name, None)
        coefficient = getattr(base, name, None) if coefficient is None else coefficient
        top_k = getattr(base, "num_experts_per_tok", None) or getattr(config, "num_experts_per_tok", None)
        if coefficient is not None and isinstance(top_k, int):
            return Router(float(coefficient), name, top_k)
    return None


def router_loss(config: JepaConfig, model: nn.Module) -> RouterLoss | None:
    """Make the term of a model, weighted by ``config.router_loss``, by default by the model's own coefficient.

    None if the weight is 0 or the model's type has no such loss; ValueError if a weight is set for such a type.
    """
    router = router_of(model)
    if router is None:
        if config.router_loss:
            name = type(base_model(model)).__name__
            raise ValueError(
                f"router_loss {config.router_loss}: {name} has no router loss (router logits, and "
                f"{COEFFICIENTS[0]} in its configuration); leave router_loss out"
            )
        return None
    weight = router.coefficient if config.router_loss is None else config.router_loss
    return RouterLoss(weight, router.top_k) if weight > 0 else None


def describe_router(config: JepaConfig, model: nn.Module) -> str | None:
    """Describe the router loss of a run on one line, for its first screen; None for a model without experts."""
    if not has_experts(base_model(model)):
        return None
    router = router_of(model)
    if router is None:
        name = type(base_model(model)).__name__
        return f"none; {name} returns no router logits, or has no {COEFFICIENTS[0]} in its configuration"
    if config.router_loss is not None:
        return f"weight {config.router_loss:g}, as asked for" if config.router_loss else "none, as asked for"
    if router.coefficient <= 0:
        return f"none; {router.name} is {router.coefficient:g} in the model's configuration"
    return f"weight {router.coefficient:g}, the model's own ({router.name})"


@term("router_loss", "router loss")
@dataclass
class RouterLoss(Term):
    """Load balancing of a mixture of experts (arXiv 2101.03961, eq. 4 to 6; arXiv 2401.06066 calls it balance loss).

    ``E * sum over experts e of f_e * p_e``, where ``f_e`` is the share of tokens that are sent to e and ``p_e`` the
    mean probability of e, over all layers and the tokens of the micro-batch's main sequences. A position that several
    main sequences share counts once for each; views and padding do not count. It is ``top_k`` where the load is even.

    It is a product of two means over a micro-batch, so its mean over an optimizer step is one over micro-batches, and
    depends on how large they are, as that of transformers and TRL.

    Attributes:
        weight: of the mean in the objective.
        top_k: number of experts that a token is sent to.
    """

    reads_router_logits: ClassVar[bool] = True

    weight: float = 0.001
    top_k: int = 2

    def count(self, batch: Batch) -> int:
        return int(any(map(len, batch.records.paths)))

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        paths = [np.empty(0, np.int64), *batch.records.paths]
        uses = np.bincount(np.concatenate(paths), minlength=len(encoded.states[-1]))
        logits = encoded.router_logits
        weights = torch.from_numpy(uses).to(logits[0].device, torch.float32, non_blocking=True)
        return load_balance(logits, weights, self.top_k)


def load_balance(logits: tuple[Tensor, ...], uses: Tensor, top_k: int) -> Tensor:
    """Compute ``E * sum over experts e of f_e * p_e``, with both means over all layers and weighted tokens.

    Args:
        logits: of each layer's router, ``[N, E]``.
        uses: ``[N]`` weight of each token, float32.
        top_k: experts that a token is sent to.

    Returns:
        A float32 scalar; 0 with a gradient of 0 where all weights are 0.
    """
    sent = probabilities = uses.new_zeros(logits[0].shape[-1])
    for layer in logits:
        shares = layer.float().softmax(-1)
        chosen = torch.zeros_like(shares).scatter_(-1, shares.topk(top_k, dim=-1).indices, 1.0)
        weights = uses.to(layer.device)
        with without_autocast(layer):
            sent = sent + (weights @ chosen).to(uses.device)
            probabilities = probabilities + (weights @ shares).to(uses.device)
    total = len(logits) * uses.sum().clamp_min(1.0)
    return logits[0].shape[-1] * ((sent / total) * (probabilities / total)).sum()
