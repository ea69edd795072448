"""Models that break others, each small: what `test_constructions` trains at every stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.distributed import test_accumulation, test_evaluation, test_inputs, test_parameters
from tests.distributed.models import WIDTH, Block, TinyLM, batch
from tests.distributed.test_parameters import Adapted, Net, features, momentum, trainable_only
from tests.distributed.training import adamw


@dataclass(frozen=True)
class Construction:
    """A model, its data and its optimizer.

    Attributes:
        in_fp32: whether tests/distributed leaves training in fp32 on 2 ranks to this table.
        evaluates: whether it can do without gradients.
        tolerance: relative, in fp32.
        lowers_buffers: whether in bf16 its buffers are bf16, too.
    """

    factory: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Any, ...]] = features
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    in_fp32: bool = True
    evaluates: bool = True
    tolerance: float = 1e-5
    lowers_buffers: bool = False


def of_blocks(block: Callable[[], nn.Module], head: type[Net] = Net) -> nn.Module:
    """``head`` with three such blocks."""
    model = head()
    model.blocks = nn.ModuleList(block() for _ in range(3))
    return model


# -- parameters in several places ---------------------------------------------------------------------


class HeadOfEmbedding(TinyLM):
    """Has no head: multiplies by the embedding's weight itself, before and after the embedding was called."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        del self.head

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        spread = self.tok.weight.float().var()
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tok.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + spread


class Table(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, whose forwards nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 9 for _ in range(2))
        self.biases = nn.ParameterDict({"up": torch.zeros(WIDTH), "down": torch.ones(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights, self.biases.values(), strict=True):
            x = x + torch.tanh(F.linear(x, weight, bias))
        return x


class Derived(nn.Module):
    """Weights that are computed of others: weight norm, and spectral norm with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.down = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


# -- modules that do not always run -------------------------------------------------------------------


class Droppable(Block):
    """Is called and does nothing now and then."""

    def forward(self, x: torch.Tensor, kept: bool = True) -> torch.Tensor:
        return super().forward(x) if kept else x


class LayerDrop(Net):
    """Leaves out blocks by chance in training, the same ones on all ranks, and from outside or from within."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Droppable() for _ in range(4))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:  # type: ignore[override]
        chances = torch.rand(len(self.blocks), generator=torch.Generator().manual_seed(step))
        x = self.stem(x)
        for i, (block, chance) in enumerate(zip(self.blocks, chances.tolist(), strict=True)):
            kept = chance > 0.5 or not self.training
            if i % 2 or kept:
                x = block(x, kept)
        return self.loss(x)


def with_step(step: int, rank: int) -> tuple[torch.Tensor, int]:
    return (*features(step, rank), step)


class Teacher(Net):
    """A frozen copy of the blocks inside of the model, called without gradients, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(Block() for _ in range(3)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = y = self.stem(x)
        for block, teacher in zip(self.blocks, self.teachers, strict=True):
            x = block(x)
            with torch.no_grad():
                y = teacher(y)
        return self.loss(x) + F.mse_loss(x, y)


# -- containers ---------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = ""


class Branch(nn.Module):
    """Modules in a ModuleDict, one of them under two names and shared with the other branches."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.parts = nn.ModuleDict({"first": inner, "second": shared, "again": inner})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.tanh(part(x)) for name, part in self.parts.items()}


class Nested(nn.Module):
    """Modules within modules within ModuleDicts; holds a parameter itself and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.branches = nn.ModuleDict({"left": Branch(shared), "right": Branch(shared)})
        self.tail = nn.ModuleDict({"deep": nn.ModuleList([Block(), nn.ModuleDict({"deeper": Block()})])})

    def forward(self, x: torch.Tensor) -> Any:
        hidden = {name: branch(x * self.scale) for name, branch in self.branches.items()}
        x = torch.stack([part for parts in hidden.values() for part in parts.values()]).sum(0)
        first, second = self.tail["deep"]
        x = second["deeper"](first(x))
        return self.packed(x.square().mean(), x)

    def packed(self, loss: torch.Tensor, x: torch.Tensor) -> Any:
        return Output(loss, (x, x.detach()), note="kept")


class NestedDict(Nested):
    def packed(self, loss: torch.Tensor, x: torch.Tensor) -> Any:
        return {"loss": loss, "hidden": [x, {"deep": x.detach()}], "note": None}


class NestedTuple(Nested):
    def packed(self, loss: torch.Tensor, x: torch.Tensor) -> Any:
        return loss, (x, [x.detach()])


def loss_of(output: Any) -> torch.Tensor:
    """The loss in whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output.loss


# -- buffers and dtypes -------------------------------------------------------------------------------


class Rotary(Net):
    """Computes with complex, integer and boolean buffers, and counts its calls in one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0, persistent=False)
        self.register_buffer("rotation", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        pairs = torch.view_as_complex(x.float()[:, self.order].unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self.rotation.pow(self.calls)).flatten(-2).to(x.dtype)
        return super().forward(torch.where(self.mask, turned, x))


class Spectral(nn.Module):
    """A filter with complex weights between Fourier transforms, as in neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=WIDTH).to(x.dtype)
        return x + torch.tanh(self.mix(filtered))


class ManyDtypes(nn.Module):
    """Parameters of three dtypes in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.usual = nn.Linear(WIDTH, WIDTH)
        self.high = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x.to(self.low.weight.dtype)).to(x.dtype)
        return x + self.usual(torch.tanh(low) * self.high.to(x.dtype))


# -- in place, checkpoints and derivatives ------------------------------------------------------------


class InPlace(Adapted):
    """Writes to its own input and returns it, so that its input's gradient comes before that of what it read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x * 1.0
        x += torch.tanh(self.base(before)) + self.up(self.down(before.detach()))
        return x


def of_adapters(block: Callable[[], nn.Module]) -> nn.Module:
    model = of_blocks(block)
    model.stem.requires_grad_(False)
    return model


class PartlyCheckpointed(Block):
    """Computes the middle of itself again in the backward."""

    reentrant = False

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self.middle, self.norm(x), use_reentrant=self.reentrant))


class PartlyReentrant(PartlyCheckpointed):
    reentrant = True


class PartlyPenalised(Net):
    """A penalty on one block's slope alone: a gradient of a gradient through part of the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():  # in evaluation, too
            x = self.blocks[0](self.stem(x)).requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[1](x).float().square().mean(), x, create_graph=True)
            return self.loss(self.blocks[2](self.blocks[1](x))) + slope.square().sum()


# -- what users hang on, and what they call -----------------------------------------------------------


def hooked() -> nn.Module:
    """Hooks of every kind, each of which changes what it sees."""
    model = Net()
    first, second, third = model.blocks
    first.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
    first.register_forward_hook(lambda module, args, output: output * 0.9)
    second.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 1.5,))
    second.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
    third.up.weight.register_hook(lambda grad: grad * 2)
    return model


class ByForward(Net):
    """Calls its blocks' forward, which no hook sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in self.blocks:
            x = block.forward(x)
        return self.loss(x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Custom(Block):
    """A function with a backward of its own, and a change in place of what a module gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(Scaled.apply(x, self.norm.weight))
        hidden.mul_(0.5)
        out = self.down(torch.tanh(hidden))
        out += x
        return out


class Marked(nn.Parameter):
    """Somebody's own class of parameters."""


class Image(nn.Module):
    """Convolutions in another memory format, and a weight of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU()) for _ in range(2))
        self.stem.weight = Marked(self.stem.weight.detach())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(-1, 1, 4, 6))
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


TABLE: dict[str, Construction] = {
    "tied embedding and head": Construction(TinyLM, batch, in_fp32=False),
    "head that reads the embedding": Construction(HeadOfEmbedding, batch),
    "adapters beside frozen layers": Construction(test_parameters.adapted, optimizer=trainable_only, in_fp32=False),
    "module called twice": Construction(test_parameters.Recurrent, in_fp32=False),
    "module skipped on some steps": Construction(
        test_parameters.Skipping, test_parameters.skipping_on_all_ranks, in_fp32=False
    ),
    "layer drop": Construction(LayerDrop, with_step, momentum),
    "frozen teacher inside": Construction(Teacher, optimizer=trainable_only),
    "parameters used directly": Construction(test_parameters.Direct, in_fp32=False),
    "parameter lists and dicts": Construction(functools.partial(of_blocks, Table)),
    "weight and spectral norm": Construction(functools.partial(of_blocks, Derived), lowers_buffers=True),
    "nested, a dataclass out": Construction(Nested),
    "nested, a dict out": Construction(NestedDict),
    "nested, a tuple out": Construction(NestedTuple),
    "containers between modules": Construction(test_inputs.Contained, test_inputs.masked, in_fp32=False),
    "integer and complex buffers": Construction(Rotary),
    "batch norm": Construction(test_evaluation.Normalised, in_fp32=False),
    "complex parameters": Construction(functools.partial(of_blocks, Spectral)),
    "parameters of several dtypes": Construction(functools.partial(of_blocks, ManyDtypes), tolerance=1e-3),
    "in place on the input": Construction(functools.partial(of_adapters, InPlace), optimizer=trainable_only),
    "hooks of users": Construction(hooked),
    "forward called by its name": Construction(ByForward),
    "functions with a backward of their own": Construction(functools.partial(of_blocks, Custom)),
    "convolutions, channels last": Construction(Image),
    "checkpoints of blocks": Construction(test_evaluation.Checkpointed, in_fp32=False),
    "reentrant checkpoints of blocks": Construction(test_evaluation.Reentrant, in_fp32=False),
    "checkpoints within blocks": Construction(functools.partial(of_blocks, PartlyCheckpointed)),
    "reentrant checkpoints within blocks": Construction(functools.partial(of_blocks, PartlyReentrant)),
    "gradient of a gradient": Construction(test_accumulation.Penalised, in_fp32=False, evaluates=False),
    "gradient of a block's gradient": Construction(PartlyPenalised),
}
