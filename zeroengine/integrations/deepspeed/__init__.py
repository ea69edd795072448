"""Import DeepSpeed checkpoints, with neither DeepSpeed nor a GPU.

- `checkpoint_import`: the import as a whole, and where it is written to.
- `checkpoint_files`: which files make up a checkpoint. `pickled_files`: reads one of them safely.
- `optimizer_states`: the optimizer state of every rank, and where each parameter lies in it.
- `converted_state`: from DeepSpeed's names and values to zeroengine's.
"""
