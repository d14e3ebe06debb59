"""Cost of training in FLOPs and memory: estimated before a run, measured during it."""
