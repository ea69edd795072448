"""The Engine and what only the engine uses: initialize, step, backward, full values, the memory report."""
