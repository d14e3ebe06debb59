"""From records to the tensors of a micro-batch: tokens, packing, mask."""
