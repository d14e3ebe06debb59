"""The one-file HTML page of runs."""
