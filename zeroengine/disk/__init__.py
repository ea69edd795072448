"""Asynchronous direct I/O, which offload and checkpoints use.

This package knows nothing of models, shards or the configuration. It takes paths, CPU tensors and byte offsets. From
the bottom up:

- ``mounts``: The file system that a path lies on.
- ``aligned_memory``: CPU memory that direct I/O can use without a copy.
- ``queue``: Reads and writes of tensors, any number at once, overlapping the computation.
- ``read_only_file``: Files of others that a queue reads.
- ``mapped_memory``: Tensors that are part of a mapped file, populated before use and evicted after it.
- ``swap_files``: Files without names, for states that do not fit in memory.
- ``sequential_files``: Files that are written from start to end and synced, for checkpoints.
- ``probe``: Measurements of a disk, and the settings that drive it best.
"""
