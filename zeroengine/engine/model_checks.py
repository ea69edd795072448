"""Checks of a model before an engine is made of it: its devices, other engines, other libraries that distribute it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from zeroengine.engine.gathered import owner_of
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


def check_one_device(model: nn.Module) -> None:
    """Check that the model's parameters are on one device.

    Raises:
        ZeroEngineError: Parameters that have values are on several devices.
    """
    first: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if not param.is_meta:
            first.setdefault(param.device, name)
    if len(first) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ZeroEngineError(
            f"the model's parameters are on several devices: {where}. A rank computes on one: move all of them there "
            'before initialize(), such as model.to("cuda"), or leave all on the CPU for initialize() to move.'
        )


def check_unowned(model: nn.Module) -> None:
    """Check that no engine owns a parameter of ``model``.

    Raises:
        ZeroEngineError: An engine owns one.
    """
    for name, param in model.named_parameters():
        # A second engine would partition shards of the first one.
        if owner_of(param) is not None:
            raise ZeroEngineError(
                f"parameter {name} already belongs to an engine: initialize() takes a model once. Use the engine that "
                "the first call returned, or end that one before, by engine.release() on every rank."
            )


def check_undistributed(model: nn.Module) -> None:
    """Check that no module of ``model`` is wrapped for data parallelism, and that no parameter is a DTensor.

    Raises:
        ZeroEngineError: There is one. The message names the first, and what to pass instead.
    """
    # A wrapper may also be inside the model, so every module is checked.
    for name, module in model.named_modules():
        for wrapper in _wrappers(module):
            where = f"the module {name}" if name else "the model"
            raise ZeroEngineError(
                f"{where} was passed through {wrapper}, which distributes it already. zeroengine partitions parameters "
                f"and reduces gradients itself: leave {wrapper} out, and write zeroengine.initialize(model, ...) with "
                "the plain module"
            )
    tensors = sys.modules.get("torch.distributed.tensor")
    # If this module was never imported, no DTensor exists. Importing it only for the check would take time.
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
    # Bases are also compared, because users subclass wrappers, and fully_shard changes a module's class to a subclass.
    for cls in type(module).__mro__:
        for (package, name), call in WRAPPERS.items():
            if cls.__name__ == name and cls.__module__.startswith(package):
                yield call
