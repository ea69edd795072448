"""Refuse models that another library has distributed already, and say which model to pass instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from zeroengine.errors import ZeroEngineError

# The call that makes each class, by the class's module and name, so that none of these modules must be imported.
WRAPPERS = {
    ("torch.nn.parallel", "DistributedDataParallel"): "DistributedDataParallel(...)",
    ("torch.nn.parallel", "DataParallel"): "DataParallel(...)",
    ("torch.distributed", "FullyShardedDataParallel"): "FullyShardedDataParallel(...)",
    ("torch.distributed", "ReplicateModule"): "replicate(...)",
    ("torch.distributed", "DDP"): "replicate(...)",
    ("torch.distributed", "FSDPModule"): "fully_shard(...)",
    ("deepspeed", "DeepSpeedEngine"): "deepspeed.initialize(...)",
}


def check_undistributed(model: nn.Module) -> None:
    """Check that no module of ``model`` is wrapped for data parallelism, and that no parameter is a DTensor.

    Raises:
        ZeroEngineError: One is. The message names the first, and what to pass.
    """
    # A wrapper inside of the model hides as well as one around it, so every module is checked.
    for name, module in model.named_modules():
        for wrapper in _wrappers(module):
            where = f"the module {name}" if name else "the model"
            raise ZeroEngineError(
                f"{where} was passed through {wrapper}, which distributes it already. zeroengine partitions parameters "
                f"and reduces gradients itself: leave {wrapper} out, and write zeroengine.initialize(model, ...) with "
                "the plain module"
            )
    tensors = sys.modules.get("torch.distributed.tensor")
    # Where this module was never imported, no DTensor can exist. Importing it only for the check takes time.
    if tensors is None:
        return
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, tensors.DTensor):
                raise ZeroEngineError(
                    f"{kind} {name} is a DTensor ({', '.join(map(str, tensor.placements))} over {tensor.device_mesh}): "
                    "it is distributed already, and tensor parallelism beside zeroengine is not supported. Pass the "
                    "model with plain tensors, as it was before parallelize_module() or distribute_tensor()"
                )


def _wrappers(module: nn.Module) -> Iterator[str]:
    # Bases are compared, too, since users subclass wrappers, and fully_shard changes a module's class to a subclass.
    for cls in type(module).__mro__:
        for (package, name), call in WRAPPERS.items():
            if cls.__name__ == name and cls.__module__.startswith(package):
                yield call
