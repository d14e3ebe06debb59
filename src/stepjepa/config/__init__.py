"""Typed settings of the objective and of a run."""
