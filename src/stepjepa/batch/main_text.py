"""A main text of a record in tokens, to which turns are added."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepjepa.views.sequences import Ids, Pair, TokenizedRecord


@dataclass(slots=True)
class MainText:
    """A main text, which further turns extend as long as each of them begins with it.

    Attributes:
        ids: all tokens so far.
        labels: of each turn, the positions whose next token is trained.
        prompt: of each turn, the positions whose next token belongs to a user message.
        pairs: the pairs of views in the text.
    """

    ids: Ids
    labels: list[Ids] = field(default_factory=list)
    prompt: list[Ids] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def is_prefix_of(self, ids: Ids) -> bool:
        """Return whether a turn begins with this text."""
        return bool(np.array_equal(self.ids, ids[: len(self.ids)]))

    def extend(self, ids: Ids, labels: Ids, prompt: Ids) -> None:
        """Add a turn that begins with this text: all tokens, and the positions of its labels."""
        self.ids = ids
        self.labels.append(labels)
        self.prompt.append(prompt)

    def tokenized(self, line: int) -> TokenizedRecord:
        """Return the text with its labels and pairs; ``line`` is that of its record."""
        return TokenizedRecord(self.ids, _joined(self.labels), _joined(self.prompt), tuple(self.pairs), line)


def _joined(parts: list[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
