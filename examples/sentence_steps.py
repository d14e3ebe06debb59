"""A custom step splitter, for ``stepjepa prepare steps --custom sentence_steps:split`` (see own_splitter.py)."""

from __future__ import annotations

import re

# A sentence that begins with one of these begins a step.
OPENING = re.compile(r"(?<=[.!?]) +(?=(?:Next|Then|After that|Finally),)")


def split(response: str) -> list[str]:
    """The steps of a response that is one paragraph.

    Args:
        response: the text, without what stands between <think> and </think>.

    Returns:
        Its steps, in order; white space around them and empty ones are seen to by ``prepare``.
    """
    return OPENING.split(response)
