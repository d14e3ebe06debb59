"""Raw data of all kinds to training records."""
