"""``JepaTrainer`` and one run from the command line."""
