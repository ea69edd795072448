"""ZeRO itself, in the order to read it.

- ``unit``: the shard and the parameters of one unit, which are views of its ``full_buffer``.
- ``gatherer``: gathers units, releases them, and gathers ahead.
- ``visit_log``: what each forward leaves, and the order of all collectives that follows from it.
- ``forward``: gathers what modules need, and writes the log; ``module_forward`` goes through lists such as experts.
- ``traversal``: goes back through the log with a ``cursor``: gathers, releases, and says what may be reduced.
- ``backward``: when a backward begins and ends, and what becomes of its gradients.
- ``reducer``: the path of a gradient, by ``unit_gradients`` and ``unit_reduces``.
"""
