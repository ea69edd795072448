"""DeepSpeed checkpoints, read with neither DeepSpeed nor a GPU."""
