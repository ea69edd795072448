"""ZeRO itself, in the order to read it.

- ``unit``: the full buffer, the shard and the parameters of one unit.
- ``released_parameter``: the class of a parameter while it is released.
- ``gatherer``: when a unit is gathered and released. It uses ``module_hooks`` (forwards), ``module_backwards``
  (backwards of single modules), ``visit_order`` (prefetch), ``saved_views`` (views that autograd saved) and
  ``deferred_frees`` (full buffers that other tensors alias).
- ``backward_tracker``: when a whole backward begins, ends or fails, in contrast to ``module_backwards``.
- ``unit_gradients``: the gradients of one unit that this rank keeps, and their flags.
- ``reducer``: the path of a gradient. It uses ``bucket_queue`` (order), ``gradient_buffers`` (buffers and copies) and
  ``offloaded_gradients``.
- ``mixed_precision``: casts, modules that keep fp32, buffers, autocast.
- ``outside_writes``: finds parameters that user code wrote, and ranks that wrote different values.
"""
