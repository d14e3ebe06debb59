"""InfoNCE at several widths at once, so that embeddings cut to their first dimensions still find their partners.

    mean over d of InfoNCE(source[:d], target[:d])        (Kusupati et al., 2022, arXiv 2205.13147)

    cd examples/terms
    stepjepa train ... --lbd 0 --term matryoshka:MatryoshkaInfoNCE --term_args '{"matryoshka_dims": [128, 64, 32, 16]}'
    python matryoshka.py RUN test.jsonl 128 64 32 16        # the share of right nearest targets, by width

``--lbd 0`` switches the alignment loss off. ``stepjepa export --embeddings`` writes a folder that
``SentenceTransformer(folder, truncate_dim=32)`` reads.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stepjepa import Batch, Context, Encoded, InfoNCE, Jepa, Term, UserError, equal_partners, read_records, term


@term("matryoshka_loss", "Matryoshka InfoNCE")
@dataclass
class MatryoshkaInfoNCE(Term):
    """Mean over widths of the InfoNCE loss of embeddings that are cut to their first dimensions."""

    weight: float = 0.1
    temperature: float = 0.07
    matryoshka_dims: Sequence[int] = ()  # by default the whole width, its half, its quarter and its eighth

    of_pairs = True
    # It depends on which pairs share a micro-batch, so that records are not sorted by length.
    compares_pairs = True

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return batch.pairs

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Sum the losses of the pairs; candidates are the targets of all processes."""
        source, target = encoded.pairs
        width = source.shape[-1]
        dims = self.matryoshka_dims or [max(1, width // part) for part in (1, 2, 4, 8)]
        if not all(0 < dim <= width for dim in dims):
            raise ValueError(f"matryoshka_dims: expected widths from 1 to {width}, got {list(dims)}")
        candidates, first = context.gather(target)
        equal = equal_partners(batch.pair_keys, context)
        infonce = InfoNCE(self.temperature)
        losses = [infonce(source[:, :dim], candidates[:, :dim], first, equal) for dim in dims]
        return sum(losses, source.new_zeros(())) / len(losses)


def hits_by_width(jepa: Jepa, file: str, dims: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield each width, and the share of sources whose nearest target, of all in the file, is equal to their own."""
    pairs = jepa.embed_pairs(read_records(file))
    width = pairs.source.shape[1]
    for dim in dims:
        if not 0 < dim <= width:
            raise UserError(f"dims: expected widths from 1 to {width}, got {dim}")
        sides = pairs.source[:, :dim], pairs.target[:, :dim]
        source, target = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
        nearest = (source @ target.T).argmax(axis=1)
        yield dim, float((pairs.same_target[nearest] == pairs.same_target).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("file")
    parser.add_argument("dims", type=int, nargs="+")
    args = parser.parse_args()
    try:
        for dim, share in hits_by_width(Jepa.from_pretrained(args.run), args.file, args.dims):
            print(f"{dim:5} dimensions: {100 * share:.1f} %")
    except UserError as error:
        sys.exit(f"error: {error}")
