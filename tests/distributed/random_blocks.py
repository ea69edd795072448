"""The blocks of which `random_models` builds its models: ordinary ones, and ones that use weights in unusual ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

VOCAB, LENGTH = 11, 4

# -- functions that read a weight in their backward ----------------------------------------------------


class SavedLinear(Function):
    """`F.linear` that keeps its weight by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class AttributeLinear(Function):
    """`F.linear` that keeps its weight as an attribute of `ctx`, which no saved-tensor hook sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class AttributeViewLinear(Function):
    """As `AttributeLinear`, with a view of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.transposed = x, weight.detach().t()
        return x @ ctx.transposed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.transposed.t(), grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class FusedCrossEntropy(Function):
    """The mean cross entropy of `hidden @ weight.T`, whose logits are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        return F.cross_entropy(hidden @ weight.t(), labels)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        hidden, weight, labels = ctx.saved_tensors
        errors = (hidden @ weight.t()).softmax(-1) - F.one_hot(labels, weight.shape[0])
        errors = errors * scale / len(labels)
        return errors @ weight, errors.t() @ hidden, None


class ChunkedCrossEntropy(Function):
    """As `FusedCrossEntropy`, whose forward computes the gradients of each chunk by autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return F.cross_entropy(hidden @ weight.t(), labels)
        total, grad_weight, grads = hidden.new_zeros(()), torch.zeros_like(weight), []
        for part, targets in zip(hidden.split(3), labels.split(3), strict=True):
            with torch.enable_grad():
                part, leaf = part.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = F.cross_entropy(F.linear(part, leaf), targets, reduction="sum") / len(labels)
                of_part, of_weight = torch.autograd.grad(loss, (part, leaf))
            total, grad_weight = total + loss.detach(), grad_weight + of_weight
            grads.append(of_part)
        ctx.save_for_backward(torch.cat(grads), grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * scale, grad_weight * scale, None


class Recompute(Function):
    """A checkpoint of one's own: the backward calls `function` again, and runs a backward inside the backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = ctx.function(leaf)
        torch.autograd.backward(out, grad)
        return None, leaf.grad


class FaultInBackward(Function):
    """The identity, whose backward raises what `switch.fault` holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, switch: Any) -> torch.Tensor:
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.switch.fault is not None:
            raise ctx.switch.fault
        return grad, None


# -- bodies of blocks: (batch, length, width) to the same ------------------------------------------------


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Dropout(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out((query @ key.transpose(1, 2)).div(query.shape[-1] ** 0.5).softmax(-1) @ value)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
            states.append(state)
        return torch.stack(states, 1)


class LSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class EncoderLayer(nn.Module):
    """torch's own layer, which reads weights of its submodules, and in evaluation hands them all to one operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 1, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Direct(nn.Module):
    """Parameters of the block itself, no layer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) + self.bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class SavedWeight(Direct):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return SavedLinear.apply(x, self.weight)


class AttributeWeight(Direct):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return AttributeLinear.apply(x, self.weight)


class AttributeView(Direct):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return AttributeViewLinear.apply(x, self.weight)


class WeightViews(Direct):
    """Rows of the weight, an expansion of the bias and a scalar that the weight gives."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([x @ rows.t() for rows in self.weight.split(2)], -1)
        return halves * self.bias.expand_as(x).sigmoid() + self.weight.norm() * self.weight.detach()[0, 0]


class KeptViews(Direct):
    """Keeps a view of its weight beyond the forward, on rank 0 alone; nobody reads it."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.kept = self.weight.detach()[1:]
        return F.linear(x, self.weight)


class ListOfParameters(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return x


class WeightNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Nested(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class InPlace(MLP):
    """In-place operations on what its layers return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x)).relu_()
        return self.down(hidden).mul_(0.5).add_(x)


class PartlyDetached(MLP):
    """A part of its output has no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) * target.sigmoid() + target


class Force(nn.Module):
    """The derivative of an energy by the block's input, by `torch.autograd.grad` inside the forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return self.energy(x).expand_as(x)
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(point)
            (force,) = torch.autograd.grad(energy.sum(), point, create_graph=True)
        return x + force + energy


class DetachedForce(Force):
    """As `Force`, whose derivative is a constant to the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return self.energy(x).expand_as(x)
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(point).sum(), point)
        return x + force + self.energy(x)


class Vmapped(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vmap(super().forward)(x)


class FunctionalGrad(nn.Module):
    """`torch.func.grad` by the input, through a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return grad(lambda point: self.layer(point).tanh().sum())(x) + self.layer(x)


class FunctionalCall(MLP):
    """The layer with weights that are computed from its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halved = {name: param * 0.5 for name, param in self.up.named_parameters()}
        return self.down(F.gelu(functional_call(self.up, halved, (self.norm(x),))))


BODIES: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "dropout": Dropout,
    "attention": Attention,
    "recurrent": Recurrent,
    "convolution": Convolution,
    "direct": Direct,
    "saved weight": SavedWeight,
    "attribute weight": AttributeWeight,
    "attribute view": AttributeView,
    "weight views": WeightViews,
    "kept views": KeptViews,
    "lstm": LSTM,
    "encoder layer": EncoderLayer,
    "parameter list": ListOfParameters,
    "weight norm": WeightNorm,
    "nested": Nested,
    "in place": InPlace,
    "partly detached": PartlyDetached,
    "force": Force,
    "detached force": DetachedForce,
    "vmap": Vmapped,
    "func grad": FunctionalGrad,
    "functional call": FunctionalCall,
}
PLAIN_BODIES = ("mlp", "attention", "convolution", "direct")
FUNC_BODIES = {"vmap", "func grad", "functional call"}  # torch.func inside
OPAQUE_TO_FUNC = {  # custom Functions, or transforms that do not nest
    "saved weight", "attribute weight", "attribute view", "force", "detached force", "dropout", *FUNC_BODIES,
}  # fmt: skip
ONCE_DIFFERENTIABLE = {"attribute weight", "attribute view", "lstm", "encoder layer"}

# -- what a block returns ---------------------------------------------------------------------------------


@dataclass
class BlockOutput:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Cache:
    """An object that nobody can look into, such as a cache of keys and values."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda hidden, extra: (hidden, extra),
    "named tuple": Pair,
    "list": lambda hidden, extra: [hidden, extra],
    "dict": lambda hidden, extra: {"hidden": hidden, "extra": extra},
    "nested": lambda hidden, extra: {"hidden": hidden, "extra": ([{"extra": extra}], None)},
    "dataclass": BlockOutput,
    "opaque": lambda hidden, extra: (hidden, Cache(extra)),
    "opaque alone": lambda hidden, extra: Cache(hidden, extra),
    "views": lambda hidden, extra: (*hidden.split(2, -1), extra),
}


def unpack(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The hidden state and the extra tensor in whatever a block returned."""
    if isinstance(output, torch.Tensor):
        return output, None
    if isinstance(output, BlockOutput):
        return output.hidden, output.extra
    if isinstance(output, Cache):
        return output.tensors[0], output.tensors[1]
    if isinstance(output, dict):
        extra = output["extra"]
        return output["hidden"], extra[0][0]["extra"] if isinstance(extra, tuple) else extra
    *parts, extra = output
    hidden = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return hidden, extra.tensors[0] if isinstance(extra, Cache) else extra


def non_defaults(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as in an instance built without arguments."""
    fields = [(f.name, getattr(instance, f.name), f.default) for f in dataclasses.fields(instance)]
    return {name: value for name, value, default in fields if value != default}


def compact(instance: Any) -> str:
    """The expression that builds a dataclass, without its defaults."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in non_defaults(instance).items())
    return f"{type(instance).__name__}({arguments})"


@dataclass(frozen=True)
class BlockSpec:
    """How one block is built.

    Attributes:
        body: a key of BODIES.
        output: a key of OUTPUTS, or "tensor", or "attribute": the extra tensor is kept in `block.extra`.
        weight_output: the extra tensor is a view of a parameter of the block's own.
        frozen: "no", "part" (the body's first parameter) or "all".
        unused: a parameter that nothing uses.
    """

    body: str = "mlp"
    output: str = "tensor"
    weight_output: bool = False
    frozen: str = "no"
    unused: bool = False

    __repr__ = compact


class Block(nn.Module):
    """A residual block; one class for every spec, so that a container of them is cut into one unit each."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.fault: BaseException | None = None  # raised in the midst of the forward
        self.fault_in_recompute = False  # raised only where a backward runs the forward again
        self.body = BODIES[spec.body](width)
        if spec.output != "tensor":
            self.probe = nn.Linear(width, 1)
        if spec.weight_output:
            self.codebook = nn.Parameter(torch.randn(3, width))
        if spec.unused:
            self.nobody = nn.Parameter(torch.randn(width))
        for param in list(self.parameters())[: {"no": 0, "part": 1, "all": None}[spec.frozen]]:
            param.requires_grad_(False)

    def forward(self, x: torch.Tensor, query: torch.Tensor | None = None) -> Any:
        hidden, extra = self.encode(x, query)
        if self.spec.output == "tensor":
            return hidden
        assert extra is not None
        if self.spec.output == "attribute":
            self.extra = extra
            return hidden
        return OUTPUTS[self.spec.output](hidden, extra)

    def encode(self, x: torch.Tensor, query: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The work of the forward, which may also be called from outside of it."""
        x = x if query is None else x * query.sigmoid() + query
        if self.fault is not None and self.fault_in_recompute and torch._C._current_graph_task_id() >= 0:
            raise self.fault  # at once: a checkpoint's second forward ends with the last tensor that is needed
        hidden = x * 0.5 + self.body(x)
        if self.fault is not None and not self.fault_in_recompute:
            raise self.fault
        if self.spec.output == "tensor":
            return hidden, None
        if self.spec.weight_output:
            return hidden + self.codebook.mean(0), self.codebook[:2]
        return hidden, self.probe(hidden).tanh()


class Positions(nn.Module):
    """Learned positions: returns a view of its own parameter, or the parameter itself."""

    def __init__(self, width: int, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.weight = nn.Parameter(torch.randn(LENGTH if whole else LENGTH + 2, width) / 4)

    def forward(self, length: int) -> torch.Tensor:
        return self.weight if self.whole else self.weight[:length]
