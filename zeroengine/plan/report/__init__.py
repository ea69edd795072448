"""The plan as Python, as JSON and as a table."""
