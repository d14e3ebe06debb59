"""A bag of answer tokens: the state that ends the prompt says which tokens the answer will hold (FSP, 2510.14751).

    mean over the tokens of the vocabulary of the binary cross-entropy of "does it occur in the answer?"

read from the LM head at the last token in front of the first label of each record.

    cd examples/terms
    stepjepa train ... --term bag_of_tokens:BagOfTokens --term_args '{"weight": 0.2}'
"""

from dataclasses import dataclass

import torch
from places import answers
from torch import Tensor, nn

from stepjepa import Batch, Context, Encoded, Term, term


@term("bag_loss", "bag of tokens")
@dataclass
class BagOfTokens(Term):
    """A term that needs no views, and so works in any mode."""

    weight: float = 0.2

    def count(self, batch: Batch) -> int:
        """Records."""
        return len(batch.records.paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """One set of logits a record."""
        ends, tokens = answers(batch)
        logits = encoded.logits(ends).float()
        wanted = torch.zeros_like(logits)
        for row, places in enumerate(tokens):
            wanted[row, batch.token_ids[places]] = 1.0
        losses = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return losses.mean(-1).sum()
