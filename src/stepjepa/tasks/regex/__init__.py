"""Regular expressions of NL-RX: their syntax, and whether two of them describe the same lines."""
