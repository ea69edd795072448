"""The update backends of the sharded optimizer.

interface          the protocol, and how to add a fused optimizer
blocking_adam      fused Adam that waits for the norm; states may be offloaded
async_adam         fused Adam that issues a step without waiting for the norm
torch_optimizer    any element-wise torch optimizer, run on the shards
adam_state         moments and step counts, which both Adam backends keep
"""
