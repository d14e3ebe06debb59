"""Multi-token prediction on the same logits: from each labelled position also the tokens after the next one.

No head is added. The cross-entropy of the token two and three places on is weighed .5 and .25; the furthest is left out
in the second third of the run, and both in the last, so that training ends as plain next-token prediction.

    cd examples/terms
    stepjepa train ... --term multi_token:MultiToken
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepjepa import Batch, Context, Encoded, Term, term

SHARES = (0.5, 0.25)


@term("multi_token_loss", "multi-token")
@dataclass
class MultiToken(Term):
    """Stands beside the LM loss, which predicts the next token."""

    weight: float = 1.0

    def count(self, batch: Batch) -> int:
        """Labels, as the LM loss."""
        return len(batch.label_ids)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Along the path of each text through the tree, from positions that have labels."""
        third = 0 if context.progress is None else int(3 * min(context.progress, 0.999))
        labelled = set(batch.head_index[batch.label_row].tolist())
        total = encoded.at(batch.label_row[:0]).float().sum()
        for ahead, share in enumerate(SHARES[: len(SHARES) - third], start=2):
            pairs = [
                (place, path[number + ahead])
                for path in batch.records.paths
                for number, place in enumerate(path[:-ahead].tolist())
                if place in labelled
            ]
            if pairs:
                now, later = torch.from_numpy(np.array(pairs).T.copy()).to(batch.label_ids.device)
                total = total + share * encoded.token_loss(now, batch.token_ids[later])
        return total
