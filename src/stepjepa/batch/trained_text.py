"""Show the trained parts of a record as text, between marks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from stepjepa.base.terminal import MARKED
from stepjepa.views.sequences import TokenizedRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = 3  # texts of a record that are shown
_HEAD, _TAIL = 120, 80  # characters that are shown of a long part


def trained_text(record: TokenizedRecord, tokenizer: PreTrainedTokenizerBase) -> str:
    """Format the main texts of a record in one line, labelled tokens between :data:`~stepjepa.base.terminal.MARKED`.

    The middle of long parts is left out. A line end is shown as ``⏎``.
    """
    shown = [_marked(text, tokenizer) for text in record.texts[:_TEXTS]]
    more = len(record.texts) - len(shown)
    return " / ".join(shown) + (f" / and {more} more" if more else "")


def _marked(text: TokenizedRecord, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text with its trained parts in marks, and long parts shortened."""
    is_trained = np.zeros(len(text.ids), bool)
    is_trained[text.labels + 1] = True
    starts = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(text.ids)]
    parts = []
    for start, end in pairwise(starts):
        part = str(tokenizer.decode(text.ids[start:end].tolist(), clean_up_tokenization_spaces=False))
        part = part.replace("\n", "⏎")
        if len(part) > _HEAD + _TAIL:
            part = f"{part[:_HEAD]} … {part[-_TAIL:]}"
        parts.append(part.join(MARKED) if is_trained[start] else part)
    return "".join(parts)
