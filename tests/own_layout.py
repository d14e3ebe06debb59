"""A layout of a user's own, named on the command line by ``own_layout:main_only``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepjepa import Readout, ReadoutOptions, TokenizedRecord, TokenSequence, layout, main_sequence


@layout("main_only", modes=("llm-jepa",))
def main_only(record: TokenizedRecord, predictors: NDArray[np.int32], reading: ReadoutOptions) -> list[TokenSequence]:
    """Both views are read in the main text."""
    end = len(record.ids) - 1
    return [
        main_sequence(record),
        TokenSequence(record.ids[: end // 2], readouts=(Readout(0, "source", end // 2 - 1, end // 2),)),
        TokenSequence(record.ids[:end], readouts=(Readout(0, "target", end - 1, end),)),
    ]


def not_registered(
    record: TokenizedRecord, predictors: NDArray[np.int32], reading: ReadoutOptions
) -> list[TokenSequence]:
    """Has no decorator."""
    return []
