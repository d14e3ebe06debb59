"""The views of a record: token sequences, and the layouts that make them."""
