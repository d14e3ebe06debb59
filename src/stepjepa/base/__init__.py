"""Errors, files, the terminal, signals: what every part may use and what imports nothing of this package."""
