"""A micro-batch: the input of the model and of the terms of the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar, Union

import torch
from torch import Tensor

from stepjepa.base.counting import counted
from stepjepa.batch.mask import Calls, CallShapes, Trees, VarlenSegments
from stepjepa.views.sequences import Ids, Kind, Numbers


@dataclass(frozen=True)
class BatchRecords:
    """Facts about the records of a micro-batch, in their order. NumPy arrays: they stay on the host.

    A record has one main text, or several where its turns stand behind prompts that do not begin alike; ``rng_keys``
    and all that follow have an entry for each of these texts.

    Attributes:
        lines: line number in the record's file, from 1.
        lengths: number of tokens of the record's sequences, without any sharing of prefixes.
        rng_keys: epoch and index of the record: all that its random draws depend on.
        paths: flat positions of the tokens of the text, in text order.
        isolated: indices into its path of the tokens that do not see all earlier text.
        labels: indices into its path of the tokens that are trained to predict the next one.
        prompt: indices into its path of the tokens that precede a user-message token.
        plain_tokens: tokens of all records as plain rows without padding.
    """

    lines: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    rng_keys: tuple[tuple[int, int], ...] = ()
    paths: tuple[Numbers, ...] = ()
    isolated: tuple[Numbers, ...] = ()
    labels: tuple[Ids, ...] = ()
    prompt: tuple[Ids, ...] = ()
    plain_tokens: int = 0

    def __repr__(self) -> str:
        tokens = counted(self.plain_tokens, "token")
        return f"BatchRecords({counted(len(self.lines), 'record')}, {tokens} as plain rows)"


class ReadoutIndex(NamedTuple):
    """The readouts of one side, source or target, of the P pairs of a micro-batch."""

    last: Tensor  # [P] flat position of each readout; the last one if several positions are averaged
    tokens: Tensor | None = None  # [M] flat positions of all averaged tokens; None if every readout is one token
    pair: Tensor | None = None  # [M] the pair that each of these tokens belongs to


Value = TypeVar("Value")
BatchValue: TypeAlias = Union[Tensor, int, bool, BatchRecords, CallShapes, list["Batch"]]  # noqa: UP007  # a string has no |


class Batch(dict[str, BatchValue]):
    """A micro-batch: R rows of T tokens, U positions that need logits, N labels, P pairs.

    A flat position is ``row * T + column``. A position that several records share carries the labels and readouts of
    all of them. Every property below is also a key; a batch is a mapping because transformers' Trainer moves the
    tensors of mappings to its device, and of no other objects. Only tensors are moved.
    """

    def __repr__(self) -> str:
        if "num_records" not in self:  # a batch in the making
            return f"Batch({', '.join(self)})"
        shapes = ", ".join(
            f"[{rows}, {length}]" for rows, length in (one_pass.input_ids.shape for one_pass in self.passes)
        )
        numbers = {"record": self.num_records, "pair": self.pairs, "label": len(self.label_ids)}
        counts = ", ".join(counted(number, noun) for noun, number in numbers.items())
        return f"Batch({counts}; token ids {shapes} on {self.input_ids.device})"

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """Copy the batch, with its tensors on a device; the arguments are those of ``Tensor.to``.

        A copy to a CUDA device does not wait for it: what the device computes with a tensor is queued behind its copy.
        """
        moved = Batch(self)
        non_blocking = non_blocking or torch.device(device).type == "cuda"
        for name, value in self.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, list):
                moved[name] = [item.to(device, non_blocking) for item in value]
        return moved

    def _get(self, name: str, kind: type[Value]) -> Value:
        value = self[name]
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    # -- the model's input ---------------------------------------------------------------------------------------------

    @property
    def input_ids(self) -> Tensor:
        """``[R, T]`` token ids, padded on the right."""
        return self._get("input_ids", Tensor)

    @property
    def attention_mask(self) -> Tensor:
        """``[R, T]`` all ones, since padding is on the right, where no causal token sees it."""
        return self._get("attention_mask", Tensor)

    @property
    def position_ids(self) -> Tensor | None:
        """``[R, T]`` position of each token in its own sequences; None if rows are plain causal text."""
        return self._get("position_ids", Tensor) if "position_ids" in self else None

    @property
    def trees(self) -> Trees | None:
        """The visibility of tokens, from the keys ``start``, ``end`` and ``isolates``; None for plain causal text.

        A batch that runs by segments has the keys of :func:`segment_values`, too.
        """
        if "end" not in self:
            return None
        start, end, positions = (self._get(name, Tensor) for name in ("start", "end", "position_ids"))
        return Trees(start, end, positions, self._get("isolates", bool), self._segments)

    @property
    def _segments(self) -> Calls | VarlenSegments | None:
        """The segments of the batch: calls on a CPU, a varlen call on a GPU, None under a mask."""
        if "shapes" in self:
            names = ("query_index", "key_index", "query_count", "key_count", "output_index")
            return Calls(self._get("shapes", CallShapes).shapes, *(self._get(name, Tensor) for name in names))
        if "query_bounds" in self:
            queries, keys = (self._get(name, Tensor) for name in ("query_bounds", "key_bounds"))
            most_queries, most_keys, scores = (self._get(name, int) for name in ("most_queries", "most_keys", "scores"))
            index = self._get("key_index", Tensor) if "key_index" in self else None
            return VarlenSegments(queries, keys, most_queries, most_keys, scores, index)
        return None

    @property
    def passes(self) -> list[Batch]:
        """All forward passes, of which this batch is the first.

        A micro-batch may be cut into passes of rows of similar length. The key ``further`` holds the others, which
        have the model's input alone. Flat positions continue from pass to pass.
        """
        return [self, *(self._get("further", list) if "further" in self else ())]

    @property
    def token_ids(self) -> Tensor:
        """``[cells]`` token id at each flat position of all passes."""
        return torch.cat([one_pass.input_ids.flatten() for one_pass in self.passes])

    # -- labels --------------------------------------------------------------------------------------------------------

    @property
    def head_index(self) -> Tensor:
        """``[U]`` flat positions that predict a label, each once."""
        return self._get("head_index", Tensor)

    @property
    def label_row(self) -> Tensor:
        """``[N]`` index into :attr:`head_index` of the position that predicts each label."""
        return self._get("label_row", Tensor)

    @property
    def label_ids(self) -> Tensor:
        """``[N]`` token id of each label."""
        return self._get("label_ids", Tensor)

    @property
    def prompt_index(self) -> Tensor:
        """Like :attr:`head_index`, for the tokens of user messages; empty without a loss on the prompt."""
        return self._get("prompt_index", Tensor)

    @property
    def prompt_row(self) -> Tensor:
        """``[M]`` index into :attr:`prompt_index` of the position that predicts each token of user messages."""
        return self._get("prompt_row", Tensor)

    @property
    def prompt_ids(self) -> Tensor:
        """Like :attr:`label_ids`, for the tokens of user messages; empty without a loss on the prompt."""
        return self._get("prompt_ids", Tensor)

    # -- pairs ---------------------------------------------------------------------------------------------------------

    @property
    def source_index(self) -> Tensor:
        """``[P]`` flat positions of the source readouts, see :class:`ReadoutIndex`."""
        return self._get("source_index", Tensor)

    @property
    def target_index(self) -> Tensor:
        """``[P]`` flat positions of the target readouts, see :class:`ReadoutIndex`."""
        return self._get("target_index", Tensor)

    @property
    def pair_keys(self) -> Tensor:
        """``[P, 2]`` int64 hashes of the tokens that the source readout and the target readout of each pair see."""
        return torch.stack([self._get("source_key", Tensor), self._get("target_key", Tensor)], dim=1)

    @property
    def pairs(self) -> int:
        """P, the number of pairs."""
        return len(self.source_index)

    def readouts(self, kind: Kind) -> ReadoutIndex:
        """Return the readouts of one side; averaged tokens have the keys ``source_tokens`` and ``source_pair``."""
        index = self._get(f"{kind}_index", Tensor)
        if f"{kind}_tokens" not in self:
            return ReadoutIndex(index)
        return ReadoutIndex(index, self._get(f"{kind}_tokens", Tensor), self._get(f"{kind}_pair", Tensor))

    # -- facts for the host --------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed, without padding."""
        return self._get("num_tokens", int)

    @property
    def num_records(self) -> int:
        """Number of records."""
        return self._get("num_records", int)

    @property
    def num_without_pair(self) -> int:
        """Number of records without a pair of views."""
        return self._get("num_without_pair", int)

    @property
    def records(self) -> BatchRecords:
        """Facts about each record."""
        return self._get("records", BatchRecords)


def segment_values(segments: Calls | VarlenSegments) -> Batch:
    """Return the keys of a batch that hold the segments of its row, as :attr:`Batch.trees` reads them.

    Every field is a key of its own, since only tensors that are values of the batch are moved to a device.
    """
    if isinstance(segments, Calls):
        return Batch(vars(segments), shapes=CallShapes(segments.shapes))
    return Batch({name: value for name, value in segments._asdict().items() if value is not None})
