"""Models on quantized bases. The classes imitate those of bitsandbytes and torchao: where they keep tensors, and when.

``tests/integrations/transformers/qlora.py`` runs the libraries themselves.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import TinyLM

BLOCK = 8  # elements of one scale


class QuantState:
    """Scales of blocks, which are quantized themselves, and the values of the codes."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, **rest: Any) -> None:
        self.absmax, self.code = absmax, code
        self.offset, self.state2, self.shape = (rest.get(key) for key in ("offset", "state2", "shape"))


class Params4bit(nn.Parameter):
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Params4bit:
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_state, self.bnb_quantized, self.module = None, False, None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"data": self.data}

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        state = self.__getstate__()
        new = type(self)(copy.deepcopy(state["data"]))
        new.quant_state, new.bnb_quantized = copy.deepcopy(state["quant_state"]), state["bnb_quantized"]
        return new

    def _quantize(self, device: str) -> None:
        flat = self.data.view(-1, BLOCK)
        absmax = flat.abs().amax(1)
        codes = (flat / absmax[:, None] * 7 + 8).round().to(torch.uint8).view(-1, 2)
        scale = absmax.amax(0, keepdim=True) / 255
        nested = QuantState(scale, torch.arange(256, device=self.device) / 1.0)
        table = (torch.arange(16, device=self.device) - 8) / 7
        self.quant_state = QuantState(
            (absmax / scale).to(torch.uint8),
            table,
            offset=scale.sum() / 2,
            state2=nested,
            shape=self.shape,
        )
        self.data = (codes[:, :1] * 16 + codes[:, 1:]).view(-1, 1)
        self.bnb_quantized = True


def dequantized(packed: torch.Tensor, state: Any) -> torch.Tensor:
    scales = state.state2.code[state.absmax.long()] * state.state2.absmax + state.offset
    codes = torch.cat([packed // 16, packed % 16], dim=1).view(-1, BLOCK)
    return (state.code[codes.long()] * scales[:, None]).view(state.shape)


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
        packed = packed.view(-1, 1)
        # It keeps an alias of the weight without `save_for_backward`.
        ctx.tensors, ctx.state = (None, packed), state
        return x @ dequantized(packed, state).t().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient @ dequantized(ctx.tensors[1], ctx.state).to(gradient.dtype), None, None


class Linear4bit(nn.Linear):
    support_avx512bf16_for_cpu = True

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight: Any = Params4bit(self.weight.data)
        self.weight.module = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training or not self.support_avx512bf16_for_cpu, "would pack the weight anew"
        return MatMul4Bit.apply(x, self.weight, self.weight.quant_state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state
        values = {"absmax": state.absmax, "quant_map": state.code, "nested_absmax": state.state2.absmax}
        values["nested_quant_map"] = state.state2.code.clone()
        values["quant_state.bitsandbytes__nf4"] = torch.tensor([state.offset.item()])
        for key, value in values.items():
            destination[f"{prefix}weight.{key}"] = value.detach()


class Int8Params(nn.Parameter):
    has_fp16_weights = False

    def __new__(cls, data: torch.Tensor) -> Int8Params:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.CB = self.SCB = None
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Params:
        new = type(self)(copy.deepcopy(self.data, memo))
        new.CB, new.SCB = copy.deepcopy(self.CB, memo), copy.deepcopy(self.SCB, memo)
        return new

    def _quantize(self, device: str) -> None:
        self.SCB = self.data.abs().amax(1)
        self.data = self.CB = (self.data / self.SCB[:, None] * 127).round().to(torch.int8)

    def to(self, device: str) -> Int8Params:  # type: ignore[override]
        raise AssertionError("takes a device alone")


class MatmulLtState:
    def __init__(self) -> None:
        self.CB: Any = None
        self.SCB: Any = None


class MatMul8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.state = state
        return x @ (state.CB.to(x.dtype) * (state.SCB / 127).to(x.dtype)[:, None]).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        codes = ctx.state.CB.to(gradient.dtype, copy=True)
        return gradient @ codes.mul_((ctx.state.SCB / 127).to(gradient.dtype)[:, None]), None


class Linear8bitLt(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight: Any = Int8Params(self.weight.data)
        self.state = MatmulLtState()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB, self.weight.CB, self.weight.SCB = self.weight.CB, self.weight.SCB, None, None
        out = MatMul8bit.apply(x, self.state)
        self.weight.data = self.state.CB
        return out  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = self.state.SCB if self.weight.SCB is None else self.weight.SCB
        destination[prefix + "SCB"] = scales.detach()


class Int8Tensor(torch.Tensor):
    """A wrapper without memory of its own, as those of torchao."""

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, *_: Any) -> Int8Tensor:
        return cls(inner["qdata"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            return x @ (weight.qdata.to(x.dtype) * weight.scale.to(x.dtype)).t()
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return cls(func(args[0].qdata), func(args[0].scale))
        raise NotImplementedError(func)


for kind in (Params4bit, Int8Params, Linear4bit, Linear8bitLt):
    kind.__module__ = "bitsandbytes.nn.modules"
Int8Tensor.__module__ = "torchao.quantization"


def torchao_linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    wrapped = Int8Tensor((linear.weight.detach() / scale).round().to(torch.int8), scale)
    linear.weight = nn.Parameter(wrapped, requires_grad=False)
    return linear


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class QuantizedLM(TinyLM):
    """Adapters on the frozen and quantized matrices of each block."""

    def __init__(self, linear: Any, quantized: bool = True) -> None:
        super().__init__(blocks=2)
        self.requires_grad_(False)
        for block in self.blocks:
            for name in ("up", "down"):
                old = getattr(block, name)
                setattr(block, name, Adapted(linear(*old.weight.T.shape), *old.weight.T.shape))
        for param in self.parameters() if quantized else ():
            if hasattr(param, "_quantize"):
                param._quantize("cpu")


def in_4_bits() -> QuantizedLM:
    return QuantizedLM(Linear4bit)


def in_8_bits() -> QuantizedLM:
    return QuantizedLM(Linear8bitLt)


def of_torchao() -> QuantizedLM:
    return QuantizedLM(torchao_linear)


FACTORIES = {"4 bits": in_4_bits, "8 bits": in_8_bits, "torchao": of_torchao}
