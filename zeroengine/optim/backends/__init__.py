"""The update backends of the sharded optimizer.

interface          the protocol, and how to add a fused optimizer
host_adam          fused Adam with the step's scalars on the host, over states wherever they live
device_adam        fused Adam issued to a GPU without waiting for the norm
torch_optimizer    any element-wise torch optimizer, run on the shards
adam_state         moments and step counts, which both Adam backends keep
"""
