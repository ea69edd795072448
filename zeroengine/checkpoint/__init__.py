"""Save and load an engine at any stage, world size and precision, on torch Distributed Checkpoint (DCP)."""
