"""Comparison of answers, and processes with limits of time and memory for such work."""
