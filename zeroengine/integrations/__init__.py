"""Other libraries: `deepspeed` imports its checkpoints."""
