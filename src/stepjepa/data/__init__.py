"""Records and where they come from."""
