"""InfoNCE with negatives of your own: each question finds its right answer among all answers and its own wrong ones.

A record names them as views: the pair with the right answer, then as many pairs with a wrong one as ``wrong`` says:

    {"messages": [...], "views": [["the question", "the right answer"], ["the question", "a wrong answer"]]}

    cd examples/terms
    stepjepa train ... --pairs all --lbd 0 --term hard_negatives:HardNegatives --term_args '{"weight": 0.1, "wrong": 1}'

``--lbd 0`` switches the alignment loss off, which would draw wrong answers to their questions. The similarity and the
retrieval of pairs in the lines of logs count wrong pairs, too; test records without such views measure the right ones.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepjepa import Batch, Context, Encoded, Term, term


@term("hard_negative_loss", "hard negatives")
@dataclass
class HardNegatives(Term):
    """Cross-entropy of finding each right target among the right and wrong targets of all processes, by cosines."""

    weight: float = 0.1
    wrong: int = 1  # wrong pairs of each record, behind its right one
    temperature: float = 0.07

    of_pairs = True
    # It depends on which records share a micro-batch, so that these are not sorted by length.
    compares_pairs = True

    def count(self, batch: Batch) -> int:
        """Right pairs."""
        step, questions = self.wrong + 1, batch.pair_keys[:, 0]
        if len(questions) % step or not bool((questions.view(-1, step) == questions[::step, None]).all()):
            expected = f"views: expected a right pair of each record and {self.wrong} wrong, all with one source"
            raise ValueError(f"{expected}; set wrong to their number, and pairs to all")
        return len(questions) // step

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Sum the losses of the right pairs."""
        source, target = encoded.pairs
        candidates, first = context.gather(target)
        keys, _ = context.gather(batch.pair_keys)
        step = self.wrong + 1
        own_keys, source = batch.pair_keys[::step], source[::step]
        logits = F.normalize(source.float(), dim=-1) @ F.normalize(candidates.float(), dim=-1).T / self.temperature
        index = torch.arange(len(candidates), device=logits.device)
        own = torch.arange(len(source), device=logits.device) * step + first
        # No negative: a target equal to the right one, and the right target of an equal question.
        equal = own_keys[:, None] == keys
        excluded = equal[..., 1] | (equal[..., 0] & (index % step == 0))
        logits = logits.masked_fill(excluded & (index != own[:, None]), float("-inf"))
        return F.cross_entropy(logits, own, reduction="sum")
