"""The operations of this package on torch's own kernels, for tensors that no library of csrc serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeroengine.ops._library import AdamArgs

# The elements of a temporary tensor, and of one that stays in a CPU's cache.
_CHUNK = 1 << 24
_CACHED_CHUNK = 1 << 16
# torch sums this many elements on one thread, in a fixed order.
_SERIAL = 1 << 15
# No vector of torch's CPU kernels is longer. Elements after a tensor's last whole vector are rounded differently.
_VECTOR = 64


def adam_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low_precision_param: Tensor | None, args: AdamArgs
) -> None:
    """Run `zeroengine.ops.adam_step` by torch's fused kernel."""
    # As in the kernels, the master takes over written values before the update.
    if args.reload_written and low_precision_param is not None:
        reload_written(param, low_precision_param)
    # Chunks bound the fp32 copies of gradient and moments, which could otherwise be as large as the model.
    for begin in range(0, param.numel(), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        # float32 moments are not copied here, and are updated in place.
        moments = [exp_avg[chunk].float(), exp_avg_sq[chunk].float()]
        arrays = [param[chunk], grad[chunk].float() * args.grad_scale, *moments]
        numel = arrays[0].numel()
        # The rest is padded to a whole vector, so that an element's bits do not depend on where its piece ends.
        rest = numel % _VECTOR if param.device.type == "cpu" else 0
        if rest < numel:
            _fused([x[: numel - rest] for x in arrays], args)
        if rest:
            padded = [pad(x[numel - rest :], (0, _VECTOR - rest)) for x in arrays]
            _fused(padded, args)
            for x, y in zip(arrays, padded, strict=True):
                x[numel - rest :] = y[:rest]
        if exp_avg.dtype is torch.bfloat16:
            random = _random_bits(args.seed, args.offset + begin, numel, param.device)
            # If the second moment overflows bf16 both are rounded down, so that a finite moment stays finite.
            random.mul_(moments[1] < torch.finfo(torch.bfloat16).max)
            exp_avg[chunk] = _round(moments[0], random & 0xFFFF)
            exp_avg_sq[chunk] = _round(moments[1], random >> 16 & 0xFFFF)
    if low_precision_param is not None:
        # torch rounds to nearest even here, as the kernels do.
        low_precision_param.copy_(param)


def reload_written(param: Tensor, low_precision_param: Tensor) -> None:
    """Copy into `param` the values that were written into `low_precision_param` after `param` was rounded into it.

    An element of `param` whose rounded value has the bits of `low_precision_param` keeps its own bits. With
    `reload_written=True` the kernels of `adam_step` do the same without another pass. This function is for rare use.

    Args:
        param: float32, 1-D. Updated in place.
        low_precision_param: bfloat16 or float16, as long, on the same device. Not changed.
    """
    size = _CACHED_CHUNK if param.device.type == "cpu" else _CHUNK
    for wide, narrow in zip(torch.split(param, size), torch.split(low_precision_param, size), strict=True):
        written = wide.to(narrow.dtype).view(torch.int16) != narrow.view(torch.int16)
        # On a GPU, testing whether any was written would make the host wait.
        if wide.device.type != "cpu" or written.any():
            wide.copy_(torch.where(written, narrow.float(), wide))


def _fused(arrays: list[Tensor], args: AdamArgs) -> None:
    """Update param, grad, exp_avg and exp_avg_sq by the kernels behind ``torch.optim.Adam(fused=True)``."""
    kernel: Any = torch._fused_adamw_ if args.decoupled else torch._fused_adam_
    step = torch.full((), float(args.step), device=arrays[0].device)
    factors = {name: getattr(args, name) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    kernel(*([x] for x in arrays), [], [step], amsgrad=False, maximize=bool(args.maximize), **factors)


def _round(x: Tensor, random: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down by 16 random bits. See "Stochastic rounding" in csrc/cpu/kernels.inl.h."""
    # The random bits are added to the lower half, which is then dropped. A carry rounds the magnitude up.
    return (random.add_(x.view(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)


def _random_bits(seed: int, index: int, numel: int, device: torch.device) -> Tensor:
    """Return the random bits that the kernels use for the elements from `index` on: one int32 for each element."""
    upper, lower = divmod(index, 1 << 32)
    # The key depends on the upper half of the index, and one pass uses one key.
    if numel > (same_half := (1 << 32) - lower):
        first_part = _random_bits(seed, index, same_half, device)
        return torch.cat([first_part, _random_bits(seed, index + same_half, numel - same_half, device)])
    key, first = divmod(_mix(_mix(seed + 0x9E3779B97F4A7C15) + upper), 1 << 32)
    # torch has no unsigned 32-bit arithmetic on some devices. int32 sums and products wrap to the same bits.
    x = torch.arange(numel, dtype=torch.int32, device=device).add_(_int32(first + lower))
    x.bitwise_xor_(_shift(x, 16)).mul_(_int32(0x7FEB352D)).bitwise_xor_(_int32(key))
    x.bitwise_xor_(_shift(x, 15)).mul_(_int32(0x846CA68B))
    return x.bitwise_xor_(_shift(x, 16))


def _mix(x: int) -> int:
    """Return the finalizer of splitmix64."""
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def _int32(x: int) -> int:
    """Return the lower 32 bits of `x`, read as an int32."""
    return ((x & (1 << 32) - 1) ^ 1 << 31) - (1 << 31)


def _shift(x: Tensor, n: int) -> Tensor:
    """Shift to the right, with zeros coming in."""
    # torch extends the sign of a negative int32, so the upper bits are cleared.
    return (x >> n).bitwise_and_((1 << 32 - n) - 1)


def squared_norm(x: Tensor) -> Tensor:
    """Run `zeroengine.ops.squared_norm` by torch, with a bounded chunk in float64 at a time."""
    # On the CPU a chunk is small enough for torch to sum it on one thread, so the number of threads changes no bit.
    chunks = torch.split(x, _SERIAL if x.device.type == "cpu" else _CHUNK)
    return torch.stack([chunk.double().square_().sum() for chunk in chunks]).sum()
