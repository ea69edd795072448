"""The nodes of a run: connected to, checked, started, and started again where a failure allows it."""
