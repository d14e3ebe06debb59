"""Load or build a model, and run it on trees of token sequences."""
