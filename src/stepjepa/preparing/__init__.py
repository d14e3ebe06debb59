"""Conversion of raw data sets and responses into training records."""
