"""A bag of answer tokens: the state that ends the prompt says which tokens the answer will hold (FSP, 2510.14751).

    mean over the tokens of the vocabulary of the binary cross-entropy of "does it occur in the answer?"

read from the LM head at the last token in front of the first label of each record.

    cd examples/terms
    stepjepa train ... --term bag_of_tokens:BagOfTokens --term_args '{"weight": 0.2}'
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stepjepa import Batch, Context, Encoded, Term, term


@term("bag_loss", "bag of tokens")
@dataclass
class BagOfTokens(Term):
    """Needs no views: it stands beside any mode."""

    weight: float = 0.2

    def count(self, batch: Batch) -> int:
        """Records."""
        return len(batch["members"].paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """One set of logits a record."""
        labelled = batch["head_index"][batch["label_row"]].cpu().numpy()
        paths = [path for path in batch["members"].paths if np.isin(path, labelled).any()]
        # Of each text the number of its first label's position: the answer begins behind it.
        firsts = [int(np.isin(path, labelled).argmax()) for path in paths]
        device = batch["label_ids"].device
        read = torch.tensor([path[first] for path, first in zip(paths, firsts, strict=True)], dtype=torch.long)
        logits = encoded.logits(read.to(device)).float()
        wanted = torch.zeros_like(logits)
        for row, (path, first) in enumerate(zip(paths, firsts, strict=True)):
            wanted[row, batch.token_ids[torch.from_numpy(path[first + 1 :]).to(device)]] = 1.0
        losses = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return losses.mean(-1).sum()
