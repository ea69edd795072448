"""The Engine and what only the Engine uses.

- ``initialize``: from a model and a configuration to an engine; the checks before anything is changed.
- ``assembly``: makes the parts of an engine and names them.
- ``engine``: the Engine itself, a thin loop over its parts.
- ``step``: the end of a step: clipping, the update, the LR schedule, the counters.
- ``accumulation``: counts micro-steps, and says which call may end a step.
- ``checkpointing``: what precedes and follows a save or a load of checkpoints and weights.
- ``parameter_access``, ``gathered``: whole values of partitioned states for the user.
- ``memory``: the report of the bytes that each state holds, and the text of out-of-memory errors.
- ``temporary_offload``: moves states off the device on request, and back.
- ``mixed_precision``: casts, modules that keep fp32, buffers, autocast.
- ``dataloader``: a data loader whose position is part of checkpoints.
- ``duplicate_inputs``, ``foreign_parameters``: find mistakes that would train something else without a word.
"""
