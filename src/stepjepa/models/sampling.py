"""Decoding settings, generated answers and scored token spans. Free of torch, so that ``--help`` is quick."""

from dataclasses import dataclass
from typing import NamedTuple

from stepjepa.base.terminal import note
from stepjepa.config.option import FROM_ONE, FROM_ZERO, SHARE_OR_ALL, check_effects, check_values, option

LONGEST = 512  # longest answer in the published evaluation with `max_new_tokens -1`


def _length(text: str) -> int:
    """Parse ``max_new_tokens``; -1 has the effect that it has in the published evaluation."""
    if text != "-1":
        return int(text)
    note(f"`max_new_tokens -1` is `max_new_tokens {LONGEST}`")
    return LONGEST


@dataclass(frozen=True)
class Sampling:
    """Settings of decoding; UserError if one is out of range or has no effect on greedy answers."""

    max_new_tokens: int = option(256, "longest answer in tokens", allowed=FROM_ONE, parse=_length)
    temperature: float = option(0.0, "temperature of sampling; 0 answers greedily", metavar="T", allowed=FROM_ZERO)
    top_p: float = option(
        1.0,
        "sample from the likeliest tokens of this total probability",
        metavar="P",
        allowed=SHARE_OR_ALL,
        only_with="temperature",
    )
    top_k: int = option(
        0, "sample from the K likeliest tokens; 0 for all", metavar="K", allowed=FROM_ZERO, only_with="temperature"
    )
    seed: int = option(42, "seed of sampling", allowed=FROM_ZERO)
    num_samples: int = option(
        1, "samples of each prompt; adds pass@N and the majority answer", allowed=FROM_ONE, only_with="temperature"
    )

    def __post_init__(self) -> None:
        check_values(self)
        check_effects(vars(self), Sampling)


class Answer(NamedTuple):
    """A generated answer."""

    text: str  # before the first stop token, without special tokens
    stopped: bool | None = None  # whether the model ended its turn with a stop token; None if unknown
    new_tokens: int | None = None  # number of generated tokens, including the stop token; None if unknown


class Span(NamedTuple):
    """A row of tokens whose tokens from ``start`` (1 or more) on are scored by their likelihood."""

    ids: list[int]
    start: int

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return len(self.ids) - self.start
