"""What answers are compared by, and the processes that do it within limits."""
