"""Check on a machine with a GPU: whether results are right, whether training runs, and how fast it is."""
