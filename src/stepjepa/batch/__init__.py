"""From views to the tensors of a micro-batch: sequences, layouts, packing, mask."""
