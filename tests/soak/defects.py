"""Damage to the package itself, in memory, that a check must notice: a case is the damage, and the check.

Each check is also run without the damage, and must notice nothing then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from stepjepa.models import lm_head

sys.path.append(str(Path(__file__).parents[1] / "models"))

from model_types import compare


class Defect(NamedTuple):
    """One case: ``damage`` patches the package, and ``notices`` says whether its check finds a fault."""

    damage: Callable[[pytest.MonkeyPatch], None]
    notices: Callable[[], bool]


def ignore_layers_before_the_head(patch: pytest.MonkeyPatch) -> None:
    """The LM loss is computed with the LM head on the decoder's own states, whatever the model does with them."""
    patch.setattr(lm_head, "_try", lambda *_: lm_head.Around())


def a_lm_loss_differs() -> bool:
    """Of models with a scale, or layers, between decoder and LM head, and of one without."""
    return not all(compare(model_type).is_exact for model_type in ("minicpm3", "modernbert-decoder", "bert", "llama"))


DEFECTS: dict[str, Defect] = {
    "layers between decoder and LM head are left out": Defect(ignore_layers_before_the_head, a_lm_loss_differs),
}
