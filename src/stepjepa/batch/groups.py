"""Groups of records that begin alike, so that a sampler can draw them together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stepjepa.views.sequences import Ids, Numbers, common_prefix

LONG_BEGINNING = 0.5
"""Share of a prompt that two records must have in common to be in one group."""


def prompt_groups(prompts: Sequence[Ids]) -> Numbers:
    """Group records that have the same prompt, or a long beginning of it in common.

    The beginning that all records have, such as one system prompt for all, does not count: every micro-batch computes
    it once in any order. Of what follows, two records adjacent in the order of their tokens are in one group if they
    share at least :data:`LONG_BEGINNING` of the longer prompt.

    Args:
        prompts: the token ids of each record's prompt, ``TokenizedDataset.prompts``.

    Returns:
        ``[records]`` the number of each record's group, from 0.
    """
    if not len(prompts):
        return np.zeros(0, np.int64)
    # Big-endian, so that bytes compare as the tokens do.
    texts = [prompt.astype(">i4").tobytes() for prompt in prompts]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    common = common_prefix(prompts[order[0]], prompts[order[-1]])
    begins = np.zeros(len(order), np.int64)
    for place, (before, own) in enumerate(pairwise(order), start=1):
        longer = max(len(prompts[before]), len(prompts[own]))
        shared = common_prefix(prompts[before], prompts[own])
        begins[place] = shared - common < LONG_BEGINNING * (longer - common)
    groups = np.empty(len(order), np.int64)
    groups[order] = np.cumsum(begins)
    return groups
