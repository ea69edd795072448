"""ZeRO itself, in the order to read it.

- ``unit``: the full buffer, the shard and the parameters of one unit.
- ``gatherer``: gathers units, releases them, and gathers ahead.
- ``visit_log``: what each forward leaves, and the order of all collectives that follows from it.
- ``forward``: gathers what modules need, and writes the log.
- ``cursor`` and ``backward``: go back through it.
- ``reducer``: the path of a gradient.
"""
