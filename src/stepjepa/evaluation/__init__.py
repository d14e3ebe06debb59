"""Score the answers of a model, or of a file, to a test file: one line per example, and a summary."""
