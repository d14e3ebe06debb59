"""``JepaTrainer``: callbacks, checkpoints, FLOPs, the record of a run, runs at equal FLOPs."""
