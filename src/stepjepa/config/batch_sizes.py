"""Default batch sizes of a trained model that embeds or answers; results depend on them in the last bits at most."""

EMBEDDED = 32
"""Sequences that are embedded at a time."""

ANSWERED = 16
"""Prompts that are answered at a time: fewer, since each keeps keys and values of all its tokens until it has ended.

``stepjepa evaluate`` embeds with it, too, as its one ``batch_size`` says.
"""
