"""Grids of runs, and what they show."""
