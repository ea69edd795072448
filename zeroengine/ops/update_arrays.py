"""The rules of the fused updates, and the arrays that they take."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zeroengine.ops._library import DTYPE_CODES, MOMENT_BLOCK, ArrayPointers

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)


@dataclass(frozen=True)
class Rule:
    """A rule of update.

    Attributes:
        code: The number of `ze_rule` in csrc/zeroengine.h.
        moments: For each moment, by its name in the state of torch's optimizer, whether it may be negative. The code of
            8 bits depends on it, so `is_signed` of the rule in csrc/rules.h says the same.
    """

    code: int
    moments: Mapping[str, bool]

    @property
    def signs(self) -> tuple[bool, ...]:
        """For each moment, whether it may be negative."""
        return tuple(self.moments.values())


RULES = MappingProxyType(
    {
        "average_only": Rule(0, {}),
        "adam": Rule(1, {"exp_avg": True, "exp_avg_sq": False}),
        "adamw": Rule(2, {"exp_avg": True, "exp_avg_sq": False}),
        "lion": Rule(3, {"exp_avg": True}),
        "sgd": Rule(4, {}),
        "momentum_sgd": Rule(5, {"momentum_buffer": True}),
        "adagrad": Rule(6, {"sum": False}),
    }
)
# Whether a moment may be negative, by its name. Rules that share a name agree.
MOMENT_SIGNS = MappingProxyType({name: sign for rule in RULES.values() for name, sign in rule.moments.items()})


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

    def of_rule(self, rule: str) -> UpdateArrays:
        """Return the arrays that a rule takes, some of which other rules may need beside them."""
        count = len(RULES[rule].signs)
        grad = None if rule == "average_only" else self.grad
        return self._replace(grad=grad, moments=self.moments[:count], scales=self.scales[:count])

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
