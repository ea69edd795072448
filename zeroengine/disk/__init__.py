"""Asynchronous direct I/O, which offload and checkpoints both stand on. Knows nothing of models or ranks."""
