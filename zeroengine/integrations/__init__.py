"""Other libraries: their checkpoints, names and trainers."""
