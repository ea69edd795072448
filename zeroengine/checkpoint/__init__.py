"""Save and load an engine at any stage, world size and precision, on torch Distributed Checkpoint (DCP).

- `engine_state`: what of an engine is saved, and its tensors as `entries`: by name, box by box.
- `content`: from an engine to what a checkpoint holds. `writer` writes that, all ranks together, beside training.
- `search` finds a checkpoint to load. `restore`: back into an engine, as `load_plan` says, by `name_mapping`.
- `directory`: a folder of checkpoints. `manifest` describes one, `folder_lock` guards both, `inspect` reports on them.
- `dcp_save`, `dcp_load`, `dcp_metadata`: the files of torch Distributed Checkpoint. `failures`: why one was not read.
- `on_signal`: saves when a signal announces the end of the job.
- `deepspeed`: imports checkpoints that DeepSpeed wrote.
"""
