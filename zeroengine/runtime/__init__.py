"""ZeRO on one rank: what the schedule decides, done with tensors. In the order to read it:

- ``unit``: the shard and the parameters of one unit, which are views of its ``full_buffer``.
- ``scheduling``: makes the ``schedule`` of the units; ``executor``: does what it says.
- ``gatherer``: gathers units and releases them.
- ``forward``: tells the schedule what modules do; ``backward``: what autograd does, and which gradients have come.
- ``reducer``: the path of a gradient, by ``unit_gradients`` and ``reduce_launcher``.
"""
