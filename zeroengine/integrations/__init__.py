"""Other libraries: `deepspeed` imports its checkpoints, `fsdp` turns its policies into a configuration."""
