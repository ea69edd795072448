"""The fused updates over flat buffers, in one pass: Adam, AdamW, Lion, SGD and Adagrad."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library, _fallback
from zeroengine.ops._library import DTYPE_CODES, MOMENT_BLOCK, ArrayPointers, UpdateArgs, library

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)


@dataclass(frozen=True)
class Rule:
    """A rule of update.

    Attributes:
        code: The number of `ze_rule` in csrc/zeroengine.h.
        signs: For each moment, whether it may be negative.
    """

    code: int
    signs: tuple[bool, ...]


RULES = MappingProxyType(
    {
        "average_only": Rule(0, ()),
        "adam": Rule(1, (True, False)),
        "adamw": Rule(2, (True, False)),
        "lion": Rule(3, (True,)),
        "sgd": Rule(4, ()),
        "momentum_sgd": Rule(5, (True,)),
        "adagrad": Rule(6, (False,)),
    }
)


class UpdateArrays(NamedTuple):
    """The buffers of one update: 1-D, contiguous, on one device and, but for ``scales``, of one length.

    Attributes:
        param: float32 masters; or bfloat16 or float16 parameters that have none. Updated in place.
        grad: float32, bfloat16 or float16. Not changed. None for "average_only".
        moments: Those of the rule: float32, bfloat16, or uint8 with ``scales``. Updated in place.
        scales: float32, a value for each 256 elements of a moment in uint8. Element 0 begins a block.
        low_precision_param: bfloat16 or float16. Receives the updated float32 ``param``, rounded to nearest even.
        average: float32 or bfloat16, the moving average of ``param``. Updated in place.
    """

    param: Tensor
    grad: Tensor | None
    moments: tuple[Tensor, ...] = ()
    scales: tuple[Tensor, ...] = ()
    low_precision_param: Tensor | None = None
    average: Tensor | None = None

    def check(self) -> None:
        """Check that the tensors fit one another and the kernels, which take no more than addresses and a length."""
        dtypes = {"param": tuple(DTYPE_CODES), "grad": tuple(DTYPE_CODES), "low_precision_param": _LOW_PRECISION}
        arrays = [(getattr(self, name), allowed) for name, allowed in dtypes.items()]
        arrays += [(self.average, (torch.float32, torch.bfloat16)), *((m, _MOMENTS) for m in self.moments)]
        numel, device = self.param.numel(), self.param.device
        for x, allowed in arrays:
            if x is not None:
                assert x.dtype in allowed and x.dim() == 1 and x.is_contiguous(), (x.dtype, x.stride())
                assert (x.numel(), x.device) == (numel, device), (x.shape, x.device)
        assert self.low_precision_param is None or self.param.dtype is torch.float32
        assert len({moment.dtype for moment in self.moments}) <= 1
        assert len(self.scales) == sum(moment.dtype is torch.uint8 for moment in self.moments)
        for x in self.scales:
            assert (x.dtype, x.device) == (torch.float32, device) and x.is_contiguous(), (x.dtype, x.device)
            assert x.shape == (-(-numel // MOMENT_BLOCK),), (x.shape, numel)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that there are, in order."""
        single = (self.low_precision_param, self.average)
        tensors = (self.param, self.grad, *self.moments, *self.scales, *single)
        return [tensor for tensor in tensors if tensor is not None]

    def like(self, tensors: Sequence[Tensor]) -> UpdateArrays:
        """Return arrays with other tensors, in the order of ``tensors()``."""
        rest = iter(tensors)
        return UpdateArrays(
            next(rest),
            None if self.grad is None else next(rest),
            tuple(next(rest) for _ in self.moments),
            tuple(next(rest) for _ in self.scales),
            None if self.low_precision_param is None else next(rest),
            None if self.average is None else next(rest),
        )

    def part(self, start: int, stop: int) -> UpdateArrays:
        """Return elements ``start`` to ``stop``. With moments in uint8, ``start`` begins a block."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[start:stop]

        assert not self.scales or start % MOMENT_BLOCK == 0
        blocks = slice(start // MOMENT_BLOCK, -(-stop // MOMENT_BLOCK))
        return UpdateArrays(
            self.param[start:stop],
            cut(self.grad),
            tuple(moment[start:stop] for moment in self.moments),
            tuple(scale[blocks] for scale in self.scales),
            cut(self.low_precision_param),
            cut(self.average),
        )

    def pointers(self, reload_written: bool) -> ArrayPointers:
        """Return the arrays as the C interfaces take them."""

        def address(x: Tensor | None) -> int | None:
            return None if x is None else x.data_ptr()

        def code(x: Tensor | None) -> int:
            return 0 if x is None else DTYPE_CODES[x.dtype]

        # Codes of moments in 8 bits are no numbers of torch's dtypes.
        moments_dtype = 3 if self.scales else code(self.moments[0]) if self.moments else 0
        return ArrayPointers(
            self.param.data_ptr(),
            address(self.grad),
            (ctypes.c_void_p * 2)(*(moment.data_ptr() for moment in self.moments)),
            (ctypes.c_void_p * 2)(*(scale.data_ptr() for scale in self.scales)),
            address(self.low_precision_param),
            address(self.average),
            *(code(self.param), code(self.grad), moments_dtype, code(self.low_precision_param), code(self.average)),
            reload_written and self.low_precision_param is not None,
        )


def update_step(
    rule: str,
    arrays: UpdateArrays,
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
        arrays: The buffers.
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
            seed and index, so a piece that begins at element i of a buffer takes offset i.
    """
    arrays.check()
    # The library takes seed and offset as 64-bit numbers, and adds an element's index to the offset.
    assert step >= 1 and 0 <= seed < 1 << 63 and 0 <= offset < 1 << 63, (step, seed, offset)
    assert len(arrays.moments) == len(RULES[rule].signs), (rule, len(arrays.moments))
    args = UpdateArgs(
        *(lr, beta1, beta2, eps, weight_decay, grad_scale, average_weight, step, seed, offset),
        *(RULES[rule].code, maximize, nesterov),
    )
    device, numel = arrays.param.device, arrays.param.numel()
    if (cuda := _cuda_library.cuda_library(device)) is not None:
        pointers = ctypes.byref(arrays.pointers(reload_written))
        _cuda_library.call(cuda, "ze_cuda_update", device, pointers, numel, ctypes.byref(args))
    elif device.type == "cpu" and (cpu := library()) is not None:
        pointers = ctypes.byref(arrays.pointers(reload_written))
        cpu.ze_update(pointers, numel, ctypes.byref(args), torch.get_num_threads())
    else:
        _fallback.update_step(rule, RULES[rule].signs, arrays, args, reload_written)


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
