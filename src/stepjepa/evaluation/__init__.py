"""From a model or a file of answers and a test file to one scored line per example and a summary."""
