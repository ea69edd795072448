"""Models that are built without memory and given their values unit by unit in ``initialize``.

- ``meta_init``: the context manager, and the checks that ``initialize`` makes.
- ``recorder``: records the operations that give parameters their values.
- ``dispatch_modes``: the torch modes that show the recorder every access to a tensor.
- ``op_call``: an operation that is about to run, and which of its arguments it reads and writes.
- ``trace``: recorded operations, versions of storages, and their replay.
- ``memory_budget``: frees parameters' memory while the model is built.
- ``parameter``: a parameter on the meta device and its trace.
"""
