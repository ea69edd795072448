"""ZeRO itself, in the order to read it.

- ``unit``: the full buffer, the shard and the parameters of one unit.
- ``released_parameter``: the class of a parameter while its values are away.
- ``gatherer``: when a unit is gathered and released. It uses ``module_hooks`` (forwards), ``autograd_tracking``
  (backwards of single modules), ``visit_order`` (prefetch), ``saved_views`` (what autograd saved of parameters) and
  ``deferred_frees`` (full buffers that other tensors alias).
- ``backward_tracker``: when a whole backward begins, ends or fails.
- ``unit_gradients``: the gradients of one unit that this rank keeps, and their flags.
- ``reducer``: the path of a gradient. It uses ``gradient_buffers`` (buffers and copies) and ``offloaded_gradients``.
- ``outside_writes``: parameters that user code wrote, and ranks that wrote different values.
"""
