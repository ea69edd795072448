"""Bodies of blocks, (batch, length, width) to the same: ordinary ones, and ones that use weights in unusual ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests.distributed.random_models.functions import AttributeLinear, AttributeViewLinear, SavedLinear


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
