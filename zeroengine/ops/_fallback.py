"""The operations of this package on torch's own kernels, for tensors that no library of csrc serves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeroengine.ops._library import MOMENT_BLOCK, UpdateArgs
from zeroengine.ops.update_arrays import UpdateArrays
from zeroengine.utils.torch_internals import fused_adam, fused_adamw

# Rules that torch has fused kernels for.
ADAM_RULES = ("adam", "adamw")
# The elements of a temporary tensor, and of one that stays in a CPU's cache.
_CHUNK = 1 << 24
_CACHED_CHUNK = 1 << 16
# torch sums this many elements on one thread, in a fixed order.
_SERIAL = 1 << 15
# See second_random in csrc/update.h.
_SECOND_KEY = 0x9E3779B9
# kPlaceStride of csrc/digest.h.
PLACE_STRIDE = 0x9E3779B97F4A7C15
# No vector of torch's CPU kernels is longer. Elements after a tensor's last whole vector are rounded differently.
_VECTOR = 64


def update_step(
    rule: str, signs: tuple[bool, ...], arrays: UpdateArrays, args: UpdateArgs, reloads_written: bool
) -> None:
    """Run `zeroengine.ops.update_step` by torch: Adam by its fused kernels, other rules operation by operation."""
    # As in the kernels, the master takes over written values before the update.
    if reloads_written and arrays.low_precision_param is not None:
        reload_written(arrays.param, arrays.low_precision_param)
    # Chunks bound the fp32 copies, which could otherwise be as large as the model.
    size = _SERIAL if arrays.param.device.type == "cpu" and rule not in ADAM_RULES else _CHUNK
    for begin in range(0, arrays.param.numel(), size):
        _update_chunk(rule, signs, arrays.part(begin, min(begin + size, arrays.param.numel())), args, begin)


def _update_chunk(rule: str, signs: tuple[bool, ...], arrays: UpdateArrays, args: UpdateArgs, begin: int) -> None:
    param, grad, moments, scales, low_precision_param, average = arrays
    device, numel = param.device, param.numel()
    # float32 arrays are not copied here, and are updated in place.
    new_param, new_moments = param.float(), [moment.float() for moment in moments]
    if scales:
        pairs = zip(moments, scales, signs, strict=True)
        new_moments = [decode_moment(codes, scale, is_signed) for codes, scale, is_signed in pairs]
    if grad is not None and rule != "average_only":
        scaled = grad.float() * (-args.grad_scale if args.maximize else args.grad_scale)
        _run_rule(rule, [new_param, scaled, *new_moments], args)
    words = partial(_random_bits, args.seed, args.offset + begin, numel, device)
    if moments and moments[0].dtype is not torch.float32:
        random = words()
        if not scales:
            # If the last moment overflows bf16 all are rounded down, so that a finite moment stays finite.
            random.mul_(new_moments[-1].abs() < torch.finfo(torch.bfloat16).max)
        halves = (random & 0xFFFF, random >> 16 & 0xFFFF)
        for i, moment in enumerate(moments):
            if scales:
                encode_moment(new_moments[i], moment, scales[i], signs[i], halves[i] * 2.0**-16)
            else:
                moment.copy_(_round(new_moments[i], halves[i]))
    if param.dtype is torch.bfloat16:
        random = words(key=_SECOND_KEY).mul_(new_param.abs() < torch.finfo(torch.bfloat16).max)
        param.copy_(_round(new_param, random & 0xFFFF))
    else:
        param.copy_(new_param)
    if low_precision_param is not None:
        # torch rounds to nearest even here, as the kernels do.
        low_precision_param.copy_(param)
    if average is not None:
        mean = average.float()
        mean = mean + args.average_weight * (new_param - mean)
        if average.dtype is torch.bfloat16:
            random = words(key=_SECOND_KEY).mul_(mean.abs() < torch.finfo(torch.bfloat16).max)
            mean = _round(mean, random >> 16 & 0xFFFF)
        average.copy_(mean)


def _run_rule(rule: str, arrays: list[Tensor], args: UpdateArgs) -> None:
    """Update param, grad and moments in place."""
    numel = arrays[0].numel()
    # The rest is padded to a whole vector, so that an element's bits do not depend on where its piece ends.
    rest = numel % _VECTOR if arrays[0].device.type == "cpu" else 0
    pieces = [[x[: numel - rest] for x in arrays]] if rest < numel else []
    if rest:
        pieces.append([pad(x[numel - rest :], (0, _VECTOR - rest)) for x in arrays])
    for piece in pieces:
        if rule in ADAM_RULES:
            _run_adam(rule, piece, args)
        else:
            _run_operations(rule, *piece, args=args)
    if rest:
        for x, y in zip(arrays, pieces[-1], strict=True):
            x[numel - rest :] = y[:rest]


def _run_adam(rule: str, arrays: list[Tensor], args: UpdateArgs) -> None:
    """Run the kernels behind ``torch.optim.Adam(fused=True)``."""
    kernel: Any = fused_adamw if rule == "adamw" else fused_adam
    step = torch.full((), float(args.step), device=arrays[0].device)
    factors = {name: getattr(args, name) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    kernel(*([x] for x in arrays), [], [step], amsgrad=False, maximize=False, **factors)


def _run_operations(rule: str, param: Tensor, grad: Tensor, *moments: Tensor, args: UpdateArgs) -> None:
    """Update as csrc/rules.h does, operation by operation."""
    if rule == "lion":
        difference = grad - moments[0]
        direction = torch.sign(moments[0] + (1 - args.beta1) * difference)
        moments[0].add_((1 - args.beta2) * difference)
        param.mul_(1 - args.lr * args.weight_decay).sub_(args.lr * direction)
        return
    grad = grad + args.weight_decay * param
    if rule == "sgd":
        param.sub_(args.lr * grad)
    elif rule == "momentum_sgd":
        # The first momentum is the gradient itself, as in torch.
        moments[0].mul_(args.beta1).add_((1 if args.step == 1 else 1 - args.beta2) * grad)
        param.sub_(args.lr * (grad + args.beta1 * moments[0] if args.nesterov else moments[0]))
    else:
        moments[0].add_(grad * grad)
        rate = args.lr / (1 + (args.step - 1) * args.beta1)
        param.sub_(rate * grad / (moments[0].sqrt() + args.eps))


def decode_moment(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """Run `zeroengine.ops.decode_moment` by torch. See "A dynamic code" in csrc/dynamic_code.h."""
    number = (codes.view(torch.int8) if is_signed else codes).float()
    # Powers of tensors are not exact on every device.
    units = torch.tensor([8.0**k for k in range(-6 if is_signed else -7, 1)], device=codes.device)
    steps = 0.875 / torch.tensor([2.0**k for k in range(len(units))], device=codes.device)
    slopes, starts = units * steps, units * (steps - 0.75)
    slopes[0], starts[0] = units[0], 0
    magnitude = number.abs()
    # The range is the exponent of the number.
    range_ = magnitude.clamp(1, 2.0 ** len(units) - 1).frexp().exponent.long() - 1
    return (magnitude * slopes[range_] + starts[range_]).copysign_(number).mul_(_spread(scales, codes.numel()))


def encode_moment(
    values: Tensor, codes: Tensor, scales: Tensor, is_signed: bool, threshold: Tensor | float = 0.5
) -> None:
    """Run `zeroengine.ops.encode_moment` by torch; `threshold` is added before the fraction of a number is dropped."""
    magnitude, limits = values.abs(), torch.finfo(torch.float32)
    blocks = pad(magnitude, (0, -values.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    scales.copy_(blocks.amax(1).nan_to_num(limits.max, limits.max).clamp(limits.tiny, limits.max))
    fraction = magnitude * _spread(1 / scales, values.numel())
    units = torch.tensor([8.0**k for k in range(6 if is_signed else 7, -1, -1)], device=codes.device)
    sizes = torch.tensor([2.0**k for k in range(len(units))], device=codes.device)
    ratios = torch.tensor([8.0, 6.0], device=codes.device) / 7
    slopes, starts = units * (ratios[0] * sizes), ratios[1] * sizes - 1
    slopes[0], starts[0] = units[0], 0
    # Each range has three exponents.
    inside = fraction.clamp(8.0 ** -len(units), 0.99999994)
    range_ = (inside.frexp().exponent.long() - 1 + 3 * len(units)) // 3
    number = (fraction * slopes[range_] + starts[range_]).clamp(max=2.0 ** len(units) - 1)
    number = (number + threshold).trunc_()
    if is_signed:
        number = torch.where(values < 0, -number, number)
    else:
        number = torch.maximum(number, (fraction > 0).float())
    codes.copy_(number.to(torch.int16).bitwise_and_(255))


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(MOMENT_BLOCK)[:numel]


def reload_written(param: Tensor, low_precision_param: Tensor) -> None:
    """Copy into `param` the values that were written into `low_precision_param` after `param` was rounded into it.

    An element of `param` whose rounded value has the bits of `low_precision_param` keeps its own bits. With
    `reload_written=True` the kernels of `update_step` do the same without another pass. This function is for rare use.

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


def _round(x: Tensor, random: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down by 16 random bits. See "Stochastic rounding" in csrc/cpu/update.inl.h."""
    # The random bits are added to the lower half, which is then dropped. A carry rounds the magnitude up.
    return (random.add_(x.view(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)


def _random_bits(seed: int, index: int, numel: int, device: torch.device, key: int = 0) -> Tensor:
    """Return the random bits that the kernels use for the elements from `index` on: one int32 for each element.

    `key` is 0, or ``_SECOND_KEY`` for a second word of each element.
    """
    upper, lower = divmod(index, 1 << 32)
    # The key depends on the upper half of the index, and one pass uses one key.
    if numel > (same_half := (1 << 32) - lower):
        first_part = _random_bits(seed, index, same_half, device, key)
        return torch.cat([first_part, _random_bits(seed, index + same_half, numel - same_half, device, key)])
    first_key, first = divmod(_mix(_mix(seed + 0x9E3779B97F4A7C15) + upper), 1 << 32)
    # torch has no unsigned 32-bit arithmetic on some devices. int32 sums and products wrap to the same bits.
    x = torch.arange(numel, dtype=torch.int32, device=device).add_(signed(first + lower))
    x.bitwise_xor_(_shift(x, 16)).mul_(signed(0x7FEB352D)).bitwise_xor_(signed(first_key ^ key))
    x.bitwise_xor_(_shift(x, 15)).mul_(signed(0x846CA68B))
    return x.bitwise_xor_(_shift(x, 16))


def _mix(x: int) -> int:
    """Return the finalizer of splitmix64."""
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def signed(x: int, bits: int = 32) -> int:
    """Return the lower `bits` bits of `x`, read as a signed integer."""
    return ((x & (1 << bits) - 1) ^ 1 << bits - 1) - (1 << bits - 1)


def _shift(x: Tensor, n: int) -> Tensor:
    """Shift to the right, with zeros coming in."""
    # torch extends the sign of a negative number, so the upper bits are cleared.
    return (x >> n).bitwise_and_((1 << 8 * x.element_size() - n) - 1)


def digest(values: Tensor, first_word: int) -> Tensor:
    """Run `zeroengine.ops.digest` on contiguous bytes by torch, a bounded chunk at a time."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    size = 8 * _CACHED_CHUNK if values.device.type == "cpu" else _CHUNK
    for index, chunk in enumerate(values.split(size)):
        # The padding also copies the bytes to an address that int64 can be read at.
        words = pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)
        begin = first_word + index * size // 8 + 1
        # int64 sums and products wrap to the bits of unsigned ones.
        x = torch.arange(begin, begin + words.numel(), device=words.device).mul_(signed(PLACE_STRIDE, 64)).add_(words)
        x.bitwise_xor_(_shift(x, 30)).mul_(signed(0xBF58476D1CE4E5B9, 64))
        x.bitwise_xor_(_shift(x, 27)).mul_(signed(0x94D049BB133111EB, 64))
        total += x.bitwise_xor_(_shift(x, 31)).sum()
    return total


def squared_norm(x: Tensor) -> Tensor:
    """Run `zeroengine.ops.squared_norm` by torch, with a bounded chunk in float64 at a time."""
    # On the CPU a chunk is small enough for torch to sum it on one thread, so the number of threads changes no bit.
    chunks = torch.split(x, _SERIAL if x.device.type == "cpu" else _CHUNK)
    return torch.stack([chunk.double().square_().sum() for chunk in chunks]).sum()
