"""Errors, files, terminal, signals: used by every part, and importing no other part of this package."""
