"""The parts of the loss, and what they do to embeddings."""
