"""The memory and the arithmetic of one micro-step, traced under fake tensors: nothing is computed or allocated."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.plan.trace.meta_copy import copy_to_meta
from zeroengine.plan.trace.model_facts import ModelFacts
from zeroengine.plan.trace.operation_trace import AttentionWithoutDropout, OperationKind, OperationTrace
from zeroengine.plan.trace.repeated_blocks import count_omitted_blocks, first_differentiable, omit_equal_blocks
from zeroengine.plan.trace.sequence_parts import TracedTransport, connect_parts, connect_tiles
from zeroengine.plan.trace.split_layers import SliceExchange
from zeroengine.runtime import mixed_precision
from zeroengine.runtime.quantized_parameters import replace_quantized_parameters
from zeroengine.runtime.released_parameter import drop_gradient_of
from zeroengine.utils.tensors import map_tensors, tensors_in
from zeroengine.utils.torch_internals import (
    FAKE_TENSOR_ERRORS,
    FakeTensorMode,
    buffers_of,
    parameters_of,
)


@dataclass(frozen=True)
class OperationCount:
    """Equal operations of one pass of a micro-step.

    Attributes:
        flops: Of each one's matrix products and convolutions, counting a multiplication and an addition as two; 0 where
            there are none.
        nbytes: That each one reads and writes.
        dtype: ``fp32``, ``bf16`` or ``fp16``: what the matrix products compute in.
        count: How many there are.
        new_bytes: Of the largest tensor that each one makes.
        attention_length: The tokens of the sequences that fused attention goes over; 0: another operation.
    """

    flops: int
    nbytes: int
    dtype: str
    count: int
    new_bytes: int = 0
    attention_length: int = 0


@dataclass(frozen=True)
class MicroStep:
    """One forward and backward of one rank.

    Attributes:
        micro_batch: Samples.
        saved_bytes: The batch and the activations that live between forward and backward.
        peak_bytes: The most bytes at any time of activations, their gradients, the gradient of a parameter before it is
            copied into its bucket, temporaries, and memory that parts of sequences are sent from. Parameters and
            buffers of the model do not count.
        forward: The operations of forward.
        backward: The operations of backward. Recomputation counts.
        exchanged_bytes: That leave the rank for those which share its samples or have other experts, in forward,
            backward and recomputation.
        host_bytes: The inputs of checkpoints that are in CPU memory between forward and backward.
        summed_bytes: Of activations and their gradients that the ranks of a model group sum. See ``SliceExchange``.
        num_sums: How many sums these are.
    """

    micro_batch: int
    saved_bytes: int
    peak_bytes: int
    forward: Sequence[OperationCount]
    backward: Sequence[OperationCount]
    exchanged_bytes: int = 0
    host_bytes: int = 0
    summed_bytes: int = 0
    num_sums: int = 0


def trace_micro_step(
    model: ModelFacts, config: Config, micro_batch: int, checkpointing: bool, device: str = "cpu"
) -> MicroStep:
    """Trace one forward and backward as the engine runs them, in the configuration's precision.

    Kernels are those of the CPU, except that on ``cuda`` attention with dropout is fused. With checkpointing, each unit
    that is a block of several modules runs under ``torch.utils.checkpoint``.

    Args:
        model: The model, with a ``make_batch``.
        config: The resolved configuration.
        micro_batch: Samples of the micro-step.
        checkpointing: Whether blocks are recomputed in backward.
        device: ``cpu`` or ``cuda``.

    Raises:
        ZeroEngineError: The model's batches are unknown, its forward or backward fails, or its computation depends on
            values.
    """
    if model.make_batch is None:
        raise ZeroEngineError(
            f"{model.name}: no batch is known, so activations cannot be traced. Return `model, make_batch` from the "
            "function, where make_batch(n) returns the arguments of a call with n samples"
        )
    if config.sequence_parallel_size > 1:
        model = model.with_tokens(model.tokens_per_sample or 0, config.sequence_parallel_size)
    try:
        return _trace(model, config, micro_batch, checkpointing, device, omits_blocks=True)
    except Exception:
        # A model may reach for a block by its number. The whole model then shows what is wrong, if anything is.
        return _trace(model, config, micro_batch, checkpointing, device, omits_blocks=False)


def _trace(
    model: ModelFacts, config: Config, micro_batch: int, checkpointing: bool, device: str, *, omits_blocks: bool
) -> MicroStep:
    trace = OperationTrace()
    attention = AttentionWithoutDropout if device == "cuda" else contextlib.nullcontext
    plans = model.plans(config)
    replica = copy_to_meta(model.model)
    modules = dict(zip(model.model.modules(), replica.modules(), strict=True))
    units = [[modules[module] for module in plan.modules] for plan in plans]
    params = dict(zip(model.model.parameters(), replica.parameters(), strict=True))
    dtypes = {params[param]: plan.dtype for plan in plans for _, param in plan.params if param in params}
    runs = omit_equal_blocks(replica) if omits_blocks else []
    with contextlib.ExitStack() as undo:
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _give_fake_tensors(replica, dtypes)
        if device == "cuda":
            _leave_out_dropout_of_attention(replica)
        mixed_precision.prepare_buffers(replica, config, torch.device("cpu"), lambda buffer: None, undo)
        mixed_precision.install(replica, config, torch.device("cpu"), undo)
        moved: list[int] = []
        if checkpointing:
            moves = device == "cuda" and config.activation_checkpointing.cpu_checkpointing
            _checkpoint_blocks(units, attention, trace, moved if moves else None)
        connect_tiles(replica, config.tiling, trace, device, undo)
        transport = TracedTransport(trace, config.sequence_parallel_size, device)
        connect_parts(replica, transport, undo)
        slices = SliceExchange(trace, model.split)
        for name, module in model.model.named_modules():
            slices.connect(name, module, modules[module])
        for run in runs:
            count_omitted_blocks(run, trace, undo)
        trace.ignore([*replica.parameters(), *replica.buffers()])
        undo.enter_context(attention())
        undo.enter_context(trace)
        try:
            micro = _run(model, replica, trace, micro_batch)
        except FAKE_TENSOR_ERRORS as error:
            raise ZeroEngineError(
                f"{model.name}: its computation depends on values, which a trace does not have ({error}), such as the "
                "routing of a mixture of experts by a loop over them"
            ) from error
        except Exception as error:
            raise ZeroEngineError(
                f"{model.name}: a micro-step with micro-batch {micro_batch} failed: {type(error).__name__}: {error}"
            ) from error
    if transport.world_size > 1 and not transport.sent_bytes:
        raise ZeroEngineError(f"{model.name}: sequence_parallel_size needs zeroengine.sequence_parallel.attention")
    return replace(
        micro,
        exchanged_bytes=transport.sent_bytes + slices.sent_bytes,
        host_bytes=sum(moved),
        summed_bytes=slices.summed_bytes,
        num_sums=slices.num_sums,
    )


def _run(model: ModelFacts, replica: nn.Module, trace: OperationTrace, micro_batch: int) -> MicroStep:
    assert model.make_batch is not None
    # Fake tensors of the CPU, with memory that counts, take the places of those of the meta device.
    args, kwargs = map_tensors(partial(torch.empty_like, device="cpu"), model.make_batch(micro_batch))
    trace.operations.clear()
    loss = loss_of(replica(*args, **kwargs))
    saved_bytes, forward = trace.live_bytes, _counts(trace.operations)
    trace.operations.clear()
    if not loss.requires_grad:
        raise ValueError("no parameter that takes a gradient reaches the loss; train one (requires_grad_(True))")
    loss.backward()
    return MicroStep(
        micro_batch=micro_batch,
        saved_bytes=saved_bytes,
        peak_bytes=trace.peak_bytes,
        forward=forward,
        backward=_counts(trace.operations),
    )


def loss_of(output: Any) -> torch.Tensor:
    """Return what a loop would call ``backward`` of: the loss, or the mean of the first floating tensor."""
    loss = getattr(output, "loss", None)
    tensor = loss if isinstance(loss, torch.Tensor) else next(t for t in tensors_in(output) if t.is_floating_point())
    return tensor if tensor.dim() == 0 else tensor.float().mean()


def _counts(operations: Counter[OperationKind]) -> tuple[OperationCount, ...]:
    return tuple(
        OperationCount(flops, nbytes, dtype, count, new_bytes, attention_length)
        for (flops, nbytes, dtype, new_bytes, attention_length), count in operations.items()
    )


def _give_fake_tensors(model: nn.Module, dtypes: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Replace the parameters of ``model`` by fake tensors of the CPU, in these dtypes, and buffers likewise.

    A gradient is dropped as soon as it is complete, as the engine does when it has copied it into its bucket.
    """
    params: dict[nn.Parameter, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    replace_quantized_parameters(model, partial(torch.empty_like, device="cpu"))
    for param in model.parameters():
        if param not in dtypes:
            # A quantized parameter has fake tensors by now.
            params[param] = param
            continue
        fake = torch.empty_strided(param.shape, param.stride(), dtype=dtypes[param], device="cpu")
        params[param] = nn.Parameter(fake, requires_grad=param.requires_grad)
        if param.requires_grad:
            params[param].register_post_accumulate_grad_hook(drop_gradient_of)
    for module in model.modules():
        for name, old in parameters_of(module).items():
            if old is not None:
                parameters_of(module)[name] = params[old]
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                if buffer not in buffers:
                    buffers[buffer] = torch.empty_like(buffer, device="cpu")
                buffers_of(module)[name] = buffers[buffer]


def _leave_out_dropout_of_attention(model: nn.Module) -> None:
    """Do as ``AttentionWithoutDropout`` does, for modules whose attention no function mode sees.

    ``torch.nn.functional.multi_head_attention_forward`` is the function that the mode sees there.
    """
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _checkpoint_blocks(
    units: Sequence[Sequence[nn.Module]], attention: Callable[[], Any], trace: OperationTrace, moved: list[int] | None
) -> None:
    """Run the forward of each unit's module that has child modules under ``torch.utils.checkpoint``.

    Args:
        units: The modules of each unit.
        attention: The context of forwards. A backward leaves it, and its recomputations enter it again.
        trace: The trace.
        moved: Gets the bytes of each input that moves to the host; None: they stay on the device.
    """
    blocks = {module: None for modules in units for module in modules if next(module.children(), None) is not None}
    for block in blocks:
        # Fake tensors draw no random numbers.
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), attention()),
        )
        if moved is not None:
            block.forward = partial(_move_input, trace, moved, block.forward)


def _move_input(trace: OperationTrace, moved: list[int], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a checkpoint, and count its input as on the host until its backward, as ``HostActivations`` has it there.

    The input of the present checkpoint is on the device, and two more, which are on their way to the host or back.
    """
    output, count = call(*args, **kwargs), trace.add_bytes
    for tensor, result in zip(first_differentiable((args, kwargs)), first_differentiable(output), strict=False):
        if not moved:
            count(2 * tensor.nbytes)
            tensor.register_hook(lambda _, nbytes=-2 * tensor.nbytes: count(nbytes))
        moved.append(trace.weight * tensor.nbytes)
        count(-tensor.nbytes)
        result.register_hook(lambda _, nbytes=tensor.nbytes: count(nbytes))
    return output
