"""Checks of a model before an engine is made of it: devices, other engines, other libraries, kinds of tensors."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zeroengine.comm.packing import is_quantizable
from zeroengine.config.zero import ZeroOptimization
from zeroengine.engine.gathered import owner_of
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import UnitPlan
from zeroengine.runtime.dtensors import dtensors_in
from zeroengine.runtime.quantized_parameters import library_of
from zeroengine.utils.torch_internals import is_traceable_wrapper_subclass

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
    """Check that no module of ``model`` is wrapped for data parallelism, and that no buffer is a DTensor.

    Raises:
        ZeroEngineError: There is one. The message names the first, and what to pass instead.
    """
    # A wrapper may also be inside the model, so every module is checked.
    for name, module in model.named_modules():
        for (package, kind), wrapper in WRAPPERS.items():
            # Users subclass wrappers, and fully_shard changes a module's class to a subclass.
            if any(cls.__name__ == kind and cls.__module__.startswith(package) for cls in type(module).__mro__):
                where = f"the module {name}" if name else "the model"
                raise ZeroEngineError(
                    f"{where} was passed through {wrapper}, which distributes it already. zeroengine partitions "
                    f"parameters and reduces gradients itself: leave {wrapper} out, and write "
                    "zeroengine.initialize(model, ...) with the plain module"
                )
    tensors = sys.modules.get("torch.distributed.tensor")
    # If this module was never imported, no DTensor exists. Importing it only for the check would take time.
    if tensors is None:
        return
    for name, buffer in model.named_buffers():
        if isinstance(buffer, tensors.DTensor):
            raise ZeroEngineError(
                f"buffer {name} is a DTensor ({', '.join(map(str, buffer.placements))} over {buffer.device_mesh}), and "
                "only parameters may be split: keep the buffer as a plain tensor on every rank"
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers, with what messages call them."""
    yield from ((f"parameter {name}", param) for name, param in model.named_parameters())
    yield from ((f"buffer {name}", buffer) for name, buffer in model.named_buffers())


def check_tensor_kinds(model: nn.Module) -> None:
    """Check that the parameters and buffers of ``model`` have shapes, and plain memory that the ranks can exchange.

    Raises:
        ZeroEngineError: One is not initialized, sparse, quantized or a wrapper of other tensors, or torch cannot copy
            its dtype. The message names it, and what to do.
    """
    split = {param for _, param in dtensors_in(model)}
    for name, tensor in _named_tensors(model):
        if is_lazy(tensor):
            raise ZeroEngineError(
                f"{name} has no shape yet: its module is lazy and takes the shape in its first forward. Run one "
                "on a batch before initialize(), such as `with torch.no_grad(): model(*batch)`."
            )
        # The tensors in a quantized weight are checked when they are found.
        is_known = isinstance(tensor, nn.Parameter) and is_traceable_wrapper_subclass(tensor) and library_of(tensor)
        reason = "" if is_known or tensor in split else _reason_refused(tensor)
        if reason:
            raise ZeroEngineError(f"{name} {reason}")


def check_quantizable(zero: ZeroOptimization, plans: Sequence[UnitPlan], exact: Collection[torch.Tensor]) -> None:
    """Check that the parameters whose values or gradients are sent quantized have a dtype that can be.

    Args:
        zero: Decides what is quantized.
        plans: The units of the model.
        exact: What may hold packed bytes where it is frozen.

    Raises:
        ZeroEngineError: A parameter has another dtype than fp32, bf16 or fp16, or may hold packed bytes.
    """
    for plan in plans:
        quantized = {
            "zero_quantized_weights": zero.zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights and not plan.trainable,
            "zero_quantized_gradients": zero.zero_quantized_gradients and plan.trainable,
        }
        keys = [key for key, is_set in quantized.items() if is_set]
        names = [name for name, param in plan.params if param in exact and not plan.trainable]
        if keys and names:
            raise ZeroEngineError(
                f"parameter {names[0]} is quantized already, or frozen and matched by keep_dtype, and is sent byte for "
                f"byte; leave {' and '.join(keys)} out"
            )
        if not keys or is_quantizable(plan.dtype):
            continue
        name, param = plan.params[0]
        is_float = param.is_floating_point()
        change = "convert it, such as by model.float()" if is_float else "keep it as a buffer (register_buffer)"
        raise ZeroEngineError(
            f"parameter {name} is {str(param.dtype).removeprefix('torch.')}, and only fp32, bf16 and fp16 are "
            f"quantized; {change}, or leave {' and '.join(keys)} out"
        )


def _reason_refused(tensor: torch.Tensor) -> str:
    """Return why ``tensor`` is refused, and what to do; "" if it is not."""
    if is_traceable_wrapper_subclass(tensor):
        return (
            f"is a {type(tensor).__name__}, which wraps other tensors and has no memory of its own to partition or "
            "send. Only quantized weights of torchao may be such, as parameters. Keep the tensors that it wraps as "
            "parameters or buffers, and build it from them in the forward."
        )
    if tensor.layout is not torch.strided:
        return (
            f"has the layout {tensor.layout}: only dense tensors can be sent to the other ranks. Keep it dense "
            "(.to_dense()), keep its indices and values as two buffers, or keep it in a plain attribute of the module."
        )
    if tensor.is_quantized:
        return (
            f"is a quantized tensor ({tensor.dtype}), which torch cannot send to the other ranks. Keep its integers "
            "(.int_repr()) and its scale as two buffers, or dequantize it (.dequantize())."
        )
    try:
        torch.zeros(1, dtype=tensor.dtype, device="cpu").fill_(0).clone()
    except (RuntimeError, NotImplementedError):
        return (
            f"has the dtype {tensor.dtype}, which torch {torch.__version__} cannot copy. Keep its bytes as "
            "torch.uint8 (.view(torch.uint8)), and view them in its dtype where they are used."
        )
    return ""
