"""Readers of a run folder: the terminal, the HTML page, and zero-launch's live line. They need no torch."""
