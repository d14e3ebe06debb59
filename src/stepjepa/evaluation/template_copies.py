"""Copies of the tokens that training wrote in front of a text, so that a mean can leave them out.

The modules of sentence-transformers can't leave out the first tokens of a chat, but tokens by their ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken
from torch.nn import Parameter

from stepjepa.evaluation.sentence_transformer_modules import TokenWeights
from stepjepa.views.sequences import TokenSequence


class TemplateCopies:
    """Copies of tokens of a template: the same ones to the model, of weight 0 in a mean.

    Args:
        tokenizer: gets the copies as special tokens.

    Attributes:
        tokenizer: the same.
        names: id of a token -> its copy.
        originals: id of a copy -> id of its token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.names: dict[int, str] = {}
        self.originals: dict[int, int] = {}

    def before(self, sequence: TokenSequence) -> str:
        """Return the copies of the tokens in front of the readout of a sequence, as one text."""
        ids = sequence.ids[: sequence.readouts[0].start].tolist()
        for token in dict.fromkeys(ids):
            if token not in self.names:
                self.names[token] = name = f"<|template_{token}|>"
                self.tokenizer.add_tokens([AddedToken(name, normalized=False, special=True)], special_tokens=True)
                self.originals[self.tokenizer.convert_tokens_to_ids(name)] = token
        return "".join(self.names[token] for token in ids)

    def weights(self) -> TokenWeights:
        """Return the weights of all tokens in a mean."""
        tokens = self.tokenizer.convert_ids_to_tokens(range(self._size))
        return TokenWeights([token or "" for token in tokens], dict.fromkeys(self.names.values(), 0.0))

    @property
    def _size(self) -> int:
        """The highest id and one; a vocabulary may have ids that no token has, and then fewer tokens than ids."""
        return 1 + max(int(token) for token in self.tokenizer.get_vocab().values())

    @contextmanager
    def rows_of(self, decoder: Any) -> Iterator[None]:
        """Give the input embeddings of a decoder the rows of the copies, while it is saved."""
        embedding, size = decoder.get_input_embeddings(), decoder.config.vocab_size
        rows = embedding.weight
        extended = rows.detach().new_zeros(max(len(rows), self._size), rows.shape[1])
        extended[: len(rows)] = rows.detach()
        extended[[*self.originals]] = rows.detach()[[*self.originals.values()]]
        embedding.weight, decoder.config.vocab_size = Parameter(extended, requires_grad=False), len(extended)
        try:
            yield
        finally:
            embedding.weight, decoder.config.vocab_size = rows, size
