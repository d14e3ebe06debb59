"""Several runs: sweep, comparison, statistics, tables, page."""
