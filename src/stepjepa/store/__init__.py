"""The files of a run folder: record, checkpoints, prompts, model card."""
