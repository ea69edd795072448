"""A linear layer and the cross entropy of what it returns, computed in tiles of tokens.

[Note: Tiles of a loss]
The logits of a tile are overwritten by their gradients, from which those of the inputs follow at once. So the forward
computes all gradients of the sum of the losses, nothing is computed twice, and the backward only multiplies by the
gradient of the sum. It multiplies before it rounds the gradient of the weight to 16 bits. Therefore gradients in fp16
neither overflow, since the mean is taken first, nor vanish, since the loss scale is applied first.

The forward reads the weight and saves none of it, so the backward of a released parameter needs no gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from zeroengine.errors import ZeroEngineError
from zeroengine.sequence.group import HasSequenceGroup
from zeroengine.sequence.mean_loss import mean_loss
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import current_graph_task_keeps_graph

# The bytes of the logits of a tile: larger tiles read the weight, and add to its gradient, less often. The softmax
# takes a block of a tile at a time, which stays in the cache of a CPU.
CPU_BYTES, GPU_BYTES = (64 << 20, 4 << 20), (256 << 20, 64 << 20)


@disable_compile
def tiled_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    reduction: Literal["mean", "sum"] = "mean",
    transform: Callable[[Tensor], Tensor] | None = None,
    tile_tokens: int | None = None,
    engine: HasSequenceGroup | None = None,
) -> Tensor:
    """Return the cross entropy of ``F.linear(hidden, weight, bias)`` without the memory of these logits.

    The logits are computed in the dtype of ``hidden``, or of autocast, and the softmax in fp32, as transformers does.
    Call this in the forward of the model, where ``weight`` may be a parameter that is released.

    Args:
        hidden: Of shape (..., width).
        weight: Of shape (vocabulary, width), of the dtype of ``hidden``.
        labels: Integers of shape (...), one for each hidden state: for a language model, the next token.
        bias: Of shape (vocabulary,).
        ignore_index: The label of tokens that have no loss.
        label_smoothing: The part of the target that is distributed evenly over the vocabulary.
        softcap: The logits become ``softcap * tanh(logits / softcap)``, after ``scale``.
        scale: A factor of the logits.
        reduction: "mean" over the labels that are not ignored, by ``mean_loss``, or "sum". Without such labels
            both are 0, where torch's mean is NaN.
        transform: What else is done to each logit, before ``scale``: a differentiable function of a part of the logits.
        tile_tokens: The tokens of a tile. None: as many as have logits of 64 MiB, on GPUs 256 MiB.
        engine: As for ``mean_loss``.

    Returns:
        A scalar in fp32, or in fp64 for hidden states in fp64.

    Raises:
        ZeroEngineError: Shapes, dtypes or options are wrong, or labels are, which a GPU finds by an assertion.
    """
    kind, labels = hidden.device.type, labels.to(hidden.device)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    fits = weight.dim() == 2 and labels.dim() and hidden.shape == (*labels.shape, weight.shape[1])
    fits = fits and (bias is None or bias.shape == weight.shape[:1]) and not labels.is_floating_point()
    limits = (softcap is None or softcap > 0) and (tile_tokens is None or tile_tokens > 0) and 0 <= label_smoothing <= 1
    if not (fits and len({x.dtype for x in tensors}) == 1 and limits and reduction in ("mean", "sum")):
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (*tensors, labels))
        raise ZeroEngineError(
            "tiled_loss() takes hidden (..., width), weight (vocabulary, width) and bias (vocabulary,) of one dtype, "
            "integers as labels (...), softcap and tile_tokens above 0, label_smoothing from 0 to 1, and sum or mean; "
            f"found {found}, {softcap=}, {tile_tokens=}, {label_smoothing=}, {reduction=}"
        )
    is_kept = labels != ignore_index
    # On a GPU this would wait for the device, whose kernels check labels themselves. Labels of a plan have no values.
    if (
        kind == "cpu"
        and type(labels) is Tensor
        and (wrong := labels[is_kept & ((labels < 0) | (labels >= len(weight)))]).numel()
    ):
        raise ZeroEngineError(f"tiled_loss(): label {wrong[0]} is outside of the vocabulary of {len(weight)} tokens")

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        scores = logits if transform is None else transform(logits)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores if scale == 1 else scores * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        return F.cross_entropy(scores, targets, None, None, ignore_index, None, "sum", label_smoothing)

    tile, block = CPU_BYTES if kind == "cpu" else GPU_BYTES
    sizes = tile_tokens or 1 + tile // (len(weight) * hidden.element_size()), 1 + block // (len(weight) * 4)
    # Inside a Function gradients are never enabled.
    needs = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight, bias)]
    flat = hidden.flatten(0, -2), weight, bias, labels.flatten().long()
    total: Tensor = _TiledLoss.apply(*flat, needs, sizes, loss_of)  # type: ignore[no-untyped-call]
    # So little changes no other count, and without labels the mean is 0 and not NaN.
    return total if reduction == "sum" else mean_loss(total, is_kept.sum().float().clamp(min=1e-30), engine=engine)


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield the parts of so many rows. A plan replaces this function."""
    return (slice(start, start + size) for start in range(0, length, size))


class _TiledLoss(torch.autograd.Function):
    """Compute the sum of the losses and, in the same forward, the gradients of this sum. See "Tiles of a loss"."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> Tensor:
        # Which inputs need gradients, the tokens of a tile and of a block, and the loss of logits.
        needs, sizes, loss_of = rest
        # A released parameter is gathered here. Its memory is not held beyond this call.
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        precise, has_grad = torch.promote_types(hidden.dtype, torch.float32), any(needs)
        total, grad_hidden = hidden.new_zeros((), dtype=precise), torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needs[1] else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=precise) if needs[2] else None
        # The pages of a new buffer for each tile would take longer than the softmax.
        buffer = hidden.new_empty(min(sizes[0], len(hidden)), len(weight))
        for tile in slices(len(hidden), sizes[0]):
            rows = hidden[tile]
            logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
            if bias is not None:
                logits += bias
            for block in slices(len(rows), sizes[1]):
                part, targets = logits[block], labels[tile][block]
                # Hooks from outside, such as those of a checkpoint, would drop what the gradients need at once.
                with torch.set_grad_enabled(has_grad), saved_tensors_hooks(Tensor.detach, Tensor.detach):
                    loss = loss_of(leaf := part.detach().requires_grad_(has_grad), targets)
                total += loss.detach()
                if has_grad:
                    part.copy_(torch.autograd.grad(loss, leaf)[0])
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[tile])
            if grad_weight is not None:
                # Products of some rows at a time that are added in fp32 take no second buffer of its size.
                for some, columns in zip(grad_weight.split(4096), logits.split(4096, 1), strict=True):
                    some.addmm_(columns.t(), rows) if some.dtype is rows.dtype else some.add_(columns.t() @ rows)
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=precise)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The graph may be gone through again, and then the gradients must be as they are.
        multiply = torch.mul if current_graph_task_keeps_graph() else Tensor.mul_
        grads = (None if x is None else multiply(x, grad).to(ctx.dtype) for x in ctx.saved_tensors)
        return *grads, None, None, None, None
