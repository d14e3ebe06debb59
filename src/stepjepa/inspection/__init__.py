"""Inspection of records as tokens, verification of fast paths, analysis of embeddings."""
