"""Many forests in a few flat arrays: small in memory, quick to write down, and read back without copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from stepjepa.forests.forest import Forest, Kind, Segment

KINDS: tuple[Kind, ...] = ("main", "source", "target")

Ints = NDArray[Any]
"""An array of one of the dtypes in ``LAYOUT``."""

# Array -> dtype, length of its second dimension (0 for none), and the bounds that part it into records.
LAYOUT: dict[str, tuple[type[np.signedinteger], int, str]] = {
    "input_ids": (np.int32, 0, "token_bounds"),
    "position_ids": (np.int32, 0, "token_bounds"),
    "shift_labels": (np.int32, 0, "token_bounds"),
    "segments": (np.int32, 6, "segment_bounds"),
    "pairs": (np.int32, 2, "pair_bounds"),
    "pooled": (np.int32, 2, "pair_bounds"),
    "lines": (np.int64, 0, ""),
    "token_bounds": (np.int64, 0, ""),
    "segment_bounds": (np.int64, 0, ""),
    "pair_bounds": (np.int64, 0, ""),
}


def expand(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of runs, one run after the other: ``begins[i], begins[i] + 1, ..`` up to ``lengths[i]`` of them."""
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begins - (ends - lengths), lengths)


def as_bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where runs of these lengths begin, and where the last ends."""
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


class FlatForests(Sequence[Forest]):
    """Forests whose tokens stand one after the other in shared arrays; a forest is made when it is looked up.

    Args:
        arrays: as :attr:`arrays` gives them; see ``LAYOUT``.

    Raises:
        ValueError: the arrays are not those of forests.
    """

    def __init__(self, arrays: Mapping[str, Ints]) -> None:
        self._arrays = dict(arrays)
        _check(self._arrays)
        for array in self._arrays.values():
            array.flags.writeable = False
        self._tokens, self._segments, self._pairs = (
            self._arrays[name] for name in ("token_bounds", "segment_bounds", "pair_bounds")
        )

    @property
    def arrays(self) -> dict[str, Ints]:
        """All there is, by the names of ``LAYOUT``; not to be changed."""
        return dict(self._arrays)

    def __len__(self) -> int:
        return len(self._tokens) - 1

    @overload
    def __getitem__(self, index: int) -> Forest: ...
    @overload
    def __getitem__(self, index: slice) -> list[Forest]: ...
    def __getitem__(self, index: int | slice) -> Forest | list[Forest]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected an index below {len(self)}, got {index}")
        index %= len(self)
        tokens = slice(self._tokens[index], self._tokens[index + 1])
        pairs = slice(self._pairs[index], self._pairs[index + 1])
        rows = self._arrays["segments"][self._segments[index] : self._segments[index + 1]].tolist()
        return Forest(
            self._arrays["input_ids"][tokens],
            self._arrays["position_ids"][tokens],
            self._arrays["shift_labels"][tokens],
            tuple([Segment(a, b, KINDS[kind], parent, seen, bool(alone)) for a, b, kind, parent, seen, alone in rows]),
            self._arrays["pairs"][pairs],
            int(self._arrays["lines"][index]),
            self._arrays["pooled"][pairs],
        )

    def __iter__(self) -> Iterator[Forest]:
        return map(self.__getitem__, range(len(self)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each forest."""
        found: list[int] = np.diff(self._tokens).tolist()
        return found

    @property
    def text_lengths(self) -> list[int]:
        """Tokens of each forest without its views (``Forest.text_length``)."""
        start, end, kind, parent = self._arrays["segments"].T[:4]
        is_text = (kind == KINDS.index("main")) | ((kind == KINDS.index("target")) & (parent >= 0))
        owner = np.repeat(np.arange(len(self)), np.diff(self._segments))
        sums = np.bincount(owner, weights=(end - start) * is_text, minlength=len(self))
        found: list[int] = sums.astype(np.int64).tolist()
        return found


class FlatForestsBuilder:
    """Collects forests block by block."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[Ints]] = {name: [] for name in LAYOUT}

    def add(self, forests: Sequence[Forest]) -> None:
        """Append some forests as ``ForestBuilder`` makes them; those that are flat already are not gone through.

        Raises:
            ValueError: a forest has no ``pooled``, or a triple, which is drawn later.
        """
        if not forests:
            return
        if isinstance(forests, FlatForests):
            for name, array in forests.arrays.items():
                self._blocks[name].append(np.diff(array) if name.endswith("_bounds") else array)
            return
        if any(forest.pooled is None or forest.triple is not None for forest in forests):
            raise ValueError("expected forests with 'pooled' and without a triple, got another kind")
        for name in ("input_ids", "position_ids", "shift_labels", "pairs", "pooled"):
            self._append(name, np.concatenate([getattr(forest, name) for forest in forests]))
        segments = [segment for forest in forests for segment in forest.segments]
        rows = ((s.start, s.end, KINDS.index(s.kind), s.parent, s.attachment, s.isolated) for s in segments)
        self._append("segments", np.fromiter(chain.from_iterable(rows), np.int32, 6 * len(segments)).reshape(-1, 6))
        self._append("lines", [forest.line for forest in forests])
        self._append("token_bounds", [len(forest.input_ids) for forest in forests])
        self._append("segment_bounds", [len(forest.segments) for forest in forests])
        self._append("pair_bounds", [len(forest.pairs) for forest in forests])

    def _append(self, name: str, values: Iterable[int] | Ints) -> None:
        self._blocks[name].append(np.asarray(values, LAYOUT[name][0]))

    def build(self) -> FlatForests:
        """All forests that were added."""
        arrays: dict[str, Ints] = {}
        for name, blocks in self._blocks.items():
            dtype, width, _ = LAYOUT[name]
            if name.endswith("_bounds"):
                arrays[name] = np.concatenate([np.zeros(1, dtype), *blocks]).cumsum(dtype=dtype)
            else:
                arrays[name] = np.concatenate([np.empty((0, width) if width else 0, dtype), *blocks])
        return FlatForests(arrays)


def _check(arrays: Mapping[str, Ints]) -> None:
    if arrays.keys() != LAYOUT.keys():
        raise ValueError(f"expected the arrays {', '.join(LAYOUT)}, got {', '.join(arrays)}")
    count = len(arrays["lines"])
    for name, (dtype, width, bounds) in LAYOUT.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape[1:] != ((width,) if width else ()):
            raise ValueError(f"{name}: expected {np.dtype(dtype)} of width {width}, got {array.dtype} {array.shape}")
        if name.endswith("_bounds"):
            if len(array) != count + 1 or array[0] != 0 or (np.diff(array) < 0).any():
                raise ValueError(f"{name}: expected {count + 1} ascending numbers from 0, got others")
        elif bounds and arrays[bounds][-1] != len(array):
            raise ValueError(f"{name}: expected {arrays[bounds][-1]} rows, got {len(array)}")
