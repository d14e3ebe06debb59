"""Next-latent prediction (NextLat, arXiv 2511.05963): a small network predicts the next hidden state of a text.

    SmoothL1(f(LayerNorm([h_t ; e(x_t+1)])) + h_t, stop-gradient(h_t+1)), the mean over all positions t of the texts

f has weights of its own, which are trained and resumed with the model and are no part of what is saved as the model.

    cd examples/terms
    stepjepa train ... --term nextlat:NextLat --term_args '{"weight": 0.1}'
"""

from dataclasses import dataclass

import torch
from places import next_tokens
from torch import Tensor, nn

from stepjepa import Batch, Context, Encoded, Term, term


@term("nextlat_loss", "NextLat")
@dataclass
class NextLat(Term):
    """A term that needs no views, and so works in any mode."""

    weight: float = 0.1
    # A control: predict the state of another token, half of the tokens of the micro-batch further on.
    wrong: bool = False

    # The embeddings of tokens, and the last hidden state.
    layers = (0, -1)

    def modules(self, config: object) -> nn.Module:
        """f: two layers as wide as the model."""
        width: int = config.hidden_size  # type: ignore[attr-defined]
        return nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))

    def count(self, batch: Batch) -> int:
        """Tokens that have a next one."""
        return sum(len(path) - 1 for path in batch.records.paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Every token predicts the next one."""
        now, following = next_tokens(batch)
        network = encoded.heads[self.name]
        states = encoded.at(now)
        read = torch.cat([states, encoded.at(following, 0)], dim=-1).to(next(network.parameters()).dtype)
        predicted = network(read) + states
        latent = encoded.at(following).detach().float()
        if self.wrong:
            latent = latent.roll(len(latent) // 2, 0)
        losses = nn.functional.smooth_l1_loss(predicted.float(), latent, reduction="none")
        return losses.mean(-1).sum()
