"""Generated SQL: run without harm, compared as results and as text."""
