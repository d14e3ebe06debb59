"""Pages to look at: what runs came to, as one HTML file."""
