"""Records to forests of segments, forests to batches, and who sees whom in them."""
