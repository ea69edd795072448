"""States that live outside of device memory, in CPU memory or in files on a disk, and how they get to the update.

- ``interfaces``: The protocols of a store of states.
- ``device_copies``: Copies between a GPU and page-locked host memory, on streams of their own.
- ``disk_store``: States in files on a disk.
- ``host_store``: A GPU's states in CPU memory, or on a disk through CPU memory.
- ``pipeline``: Brings states through a few buffers to the update and back.
- ``offloaded_shards``: Parameter shards in a store, and the all-gathers that start there.
- ``host_memory``: The CPU memory that is available.
- ``placement``: Opens the stores that a configuration asks for, and assigns the units' states to them.
- ``state_offloader``: Moves all states of an engine away for a while.
"""
