"""What lies in a run folder: its record, checkpoints, prompts, card."""
