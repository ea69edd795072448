"""The fused updates over flat buffers, in one pass: Adam, AdamW, Lion, SGD and Adagrad."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library, _fallback
from zeroengine.ops._library import MOMENT_BLOCK, ArrayPointers, UpdateArgs, library
from zeroengine.ops.update_arrays import RULES, UpdateArrays


class PreparedArrays(NamedTuple):
    """Arrays that were checked, as the library of their device takes them. It may be used as long as they live.

    Attributes:
        numel: Their elements.
        device: Their device.
        pointers: Their addresses.
        arrays: They themselves, where there is no library.
    """

    numel: int
    device: torch.device
    pointers: ArrayPointers
    arrays: UpdateArrays | None


def prepare_arrays(rule: str, arrays: UpdateArrays, reload_written: bool) -> PreparedArrays:
    """Check arrays for many steps of one rule. For the arguments see ``update_step``."""
    arrays.check()
    assert len(arrays.moments) == len(RULES[rule].signs), (rule, len(arrays.moments))
    assert arrays.grad is not None or rule == "average_only", rule
    device = arrays.param.device
    has_library = _cuda_library.cuda_library(device) is not None or (device.type == "cpu" and library() is not None)
    pointers = arrays.pointers(reload_written)
    return PreparedArrays(arrays.param.numel(), device, pointers, None if has_library else arrays)


def update_step(
    rule: str,
    arrays: UpdateArrays | PreparedArrays,
    *,
    step: int,
    lr: float,
    beta1: float = 0.0,
    beta2: float = 0.0,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    average_weight: float = 0.0,
    maximize: bool = False,
    nesterov: bool = False,
    reload_written: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Take one step of a rule, in place, in one pass over memory.

    An element's result depends on that element alone (with 8-bit moments: on its block): a buffer gets the same bits
    whether it is updated at once, in pieces, or on any number of threads.

    Everything is computed in float32. Moments in uint8, and moments, averages and parameters in bfloat16, are rounded
    stochastically at the end, so that their expected values are the float32 ones. Rounding to nearest would lose
    increments below half a unit in the last place. See csrc/dynamic_code.h for the moments in uint8.

    Args:
        rule: A name of ``RULES``. "adamw" and "lion" multiply the parameter by ``1 - lr * weight_decay``, and the
            others add ``weight_decay`` times the parameter to the gradient. The sources are in csrc/rules.h.
        arrays: The buffers, or what ``prepare_arrays`` made of them for this rule and ``reload_written``.
        step: The step's number, counted from 1.
        lr, beta1, beta2, eps, weight_decay: As in torch's optimizers. Of "momentum_sgd", ``beta1`` is the momentum and
            ``beta2`` the dampening; of "adagrad", ``beta1`` is ``lr_decay``.
        grad_scale: Multiplies the gradient first. It holds 1/world, 1/loss-scale and the clip factor.
        average_weight: The weight of the new parameter in the moving average: 1 - decay.
        maximize: Whether to ascend.
        nesterov: Of "momentum_sgd".
        reload_written: Whether to compare ``low_precision_param`` with the rounded param first. An element that differs
            was written from outside since the last step: param takes its value before the update. This reads 2 more
            bytes per element.
        seed: The seed of the random bits of stochastic rounding, 0 to 2**63 - 1. Pass a new one at each step.
        offset: The index of element 0 among those that share the seed, not negative. The bits are a pure function of
            seed and index, so a piece that begins at element i of a buffer takes offset i. With moments in uint8 it
            begins a block.
    """
    prepared = arrays if isinstance(arrays, PreparedArrays) else prepare_arrays(rule, arrays, reload_written)
    assert not prepared.pointers.scales[0] or offset % MOMENT_BLOCK == 0, offset
    # The library takes seed and offset as 64-bit numbers, and adds an element's index to the offset.
    assert step >= 1 and 0 <= seed < 1 << 63 and 0 <= offset < 1 << 63, (step, seed, offset)
    args = UpdateArgs(
        *(lr, beta1, beta2, eps, weight_decay, grad_scale, average_weight, step, seed, offset),
        *(RULES[rule].code, maximize, nesterov),
    )
    device, numel, pointers = prepared.device, prepared.numel, ctypes.byref(prepared.pointers)
    if prepared.arrays is not None:
        _fallback.update_step(rule, RULES[rule].signs, prepared.arrays, args, reload_written)
    elif (cuda := _cuda_library.cuda_library(device)) is not None:
        _cuda_library.call(cuda, "ze_cuda_update", device, pointers, numel, ctypes.byref(args))
    else:
        cpu = library()
        assert cpu is not None
        cpu.ze_update(pointers, numel, ctypes.byref(args), torch.get_num_threads())


def decode_moment(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return a moment in uint8 as float32.

    Args:
        codes: uint8, 1-D. Element 0 begins a block.
        scales: float32, a value for each 256 elements.
        is_signed: Whether the moment may be negative.
    """
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    if codes.device.type == "cpu" and (cpu := library()) is not None:
        pointers = (codes.data_ptr(), scales.data_ptr(), values.data_ptr())
        cpu.ze_decode_moment(*pointers, codes.numel(), is_signed)
        return values
    return _fallback.decode_moment(codes, scales, is_signed)


def encode_moment(values: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool) -> None:
    """Write float32 values into a moment in uint8, rounded to nearest.

    Args:
        values: float32, 1-D.
        codes, scales, is_signed: As for ``decode_moment``.
    """
    if codes.device.type == "cpu" and (cpu := library()) is not None:
        cpu.ze_encode_moment(values.data_ptr(), codes.data_ptr(), scales.data_ptr(), codes.numel(), is_signed)
        return
    _fallback.encode_moment(values, codes, scales, is_signed)
