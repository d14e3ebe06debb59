"""Default batch sizes of a trained model that embeds or answers; results depend on them in the last bits at most."""

BATCH = 16
"""Records of which both views are embedded, or prompts that are answered."""

BATCH_OF_TEXTS = 2 * BATCH
"""Texts of one side to embed: as many sequences as the two views of :data:`BATCH` records."""
