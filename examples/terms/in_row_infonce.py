"""In-row InfoNCE: the state that ends the prompt finds its own answer among those of the batch, without a view.

    cross-entropy over the answers j of the batch of cos(h_i, stop-gradient(a_j)) / temperature, right where j = i

h is the last hidden state in front of the answer, a the mean of the embeddings of the answer's tokens. So it costs no
token more than plain training.

    cd examples/terms
    stepjepa train ... --term in_row_infonce:InRowInfoNCE --term_args '{"weight": 0.1}'
"""

from dataclasses import dataclass

import torch
from places import answers, question_and_answer_keys
from torch import Tensor

from stepjepa import Batch, Context, Encoded, InfoNCE, Term, equal_partners, term


@term("in_row_loss", "in-row InfoNCE")
@dataclass
class InRowInfoNCE(Term):
    """A term that needs no views, and so works in any mode."""

    weight: float = 0.1
    temperature: float = 0.07

    # The embeddings of tokens, and the last hidden state.
    layers = (0, -1)
    # It depends on which records share a micro-batch, so that these are not sorted by length.
    compares_pairs = True

    def count(self, batch: Batch) -> int:
        """Records."""
        return len(batch.records.paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """One question a record; answers of other processes are among the choices."""
        ends, tokens = answers(batch)
        states = encoded.at(ends).float()
        means = [encoded.at(places, 0).float().mean(0) for places in tokens]
        answer_embeddings = torch.stack(means) if means else states
        choices, first_choice = context.gather(answer_embeddings.detach())
        # Another record's answer is not wrong where it is the same, or its question is.
        equal = equal_partners(question_and_answer_keys(batch).to(states.device), context)
        return InfoNCE(self.temperature)(states, choices, first_choice, equal)
