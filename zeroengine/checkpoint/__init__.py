"""Save and load an engine at any stage, world size and precision, on torch Distributed Checkpoint (DCP).

- `manager`: saves and loads, all ranks together. `search` finds a checkpoint to load.
- `checkpointed_parts`: the parts of an engine that have state, and their tensors as `entries`: by name, box by box.
- `snapshot`: from an engine to what a checkpoint holds. `restore`: back, by `name_mapping`.
- `directory`: a folder of checkpoints. `manifest` describes one, `folder_lock` guards both, `inspect` reports on them.
- `dcp_save`, `dcp_load`, `dcp_metadata`: the files of torch Distributed Checkpoint. `failures`: why one was not read.
- `on_signal`: saves when a signal announces the end of the job.
- `deepspeed`: imports checkpoints that DeepSpeed wrote.
"""
