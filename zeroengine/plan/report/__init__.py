"""The plan as Python, as JSON, as a table and as a page."""
