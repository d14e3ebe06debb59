"""Load or build a model, and run it on forests."""
