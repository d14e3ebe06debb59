"""Next implicit token prediction (NITP, arXiv 2605.24956): a state predicts the shallow state of the next token.

    1 - cos(P h_t, stop-gradient(s_t+1)), the mean over all positions t of the texts

h is the last hidden state, s that after the first block, P a matrix that is trained and resumed with the model and is
no part of what is saved as the model.

    cd examples/terms
    stepjepa train ... --term nitp:NextImplicitToken --term_args '{"weight": 0.3}'
"""

from dataclasses import dataclass

from places import next_tokens
from torch import Tensor, nn

from stepjepa import Batch, Context, Encoded, Term, term

SHALLOW = 1


@term("nitp_loss", "NITP")
@dataclass
class NextImplicitToken(Term):
    """A term that needs no views, and so works in any mode."""

    weight: float = 0.3

    layers = (SHALLOW, -1)

    def modules(self, config: object) -> nn.Module:
        """P, a square matrix of the model's width."""
        width: int = config.hidden_size  # type: ignore[attr-defined]
        return nn.Linear(width, width, bias=False)

    def count(self, batch: Batch) -> int:
        """Tokens that have a next one."""
        return sum(len(path) - 1 for path in batch.records.paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Every token predicts the next one."""
        now, following = next_tokens(batch)
        projection = encoded.heads[self.name]
        predicted = projection(encoded.at(now).to(next(projection.parameters()).dtype)).float()
        target = encoded.at(following, SHALLOW).detach().float()
        return (1 - nn.functional.cosine_similarity(predicted, target, dim=-1)).sum()
