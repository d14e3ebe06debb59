"""Render messages as text: chat templates, the plain format (no chat template), predictor tokens."""
