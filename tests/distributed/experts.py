"""A mixture of experts whose ranks use different experts, and its training on a transport."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, batch, build, config
from tests.nccl_over_gloo import use_nccl_transport
from zeroengine.comm import buffer_pool

NUM_EXPERTS = 4
# What the units are: whole layers, or experts and the other parts of a layer, or experts and layers without them.
LAYERS, SINGLE = ["layers.*"], ["layers.*.mixture.experts.*", "layers.*.norm", "layers.*.mixture.shared"]
NESTED = [*LAYERS, "layers.*.mixture.experts.*"]

Call = Callable[..., Any]
REENTRANT: Call = partial(checkpoint, use_reentrant=True)
NON_REENTRANT: Call = partial(checkpoint, use_reentrant=False)
WHOLE: Call = partial(checkpoint, use_reentrant=False, early_stop=False)


def plainly(module: Call, *args: Any) -> Any:
    return module(*args)


@dataclass
class Style:
    """How a model is built and called.

    Attributes:
        layers: The number of layers.
        of_layer: Calls a layer, such as a checkpoint. The next ones likewise.
        shared_first: Whether the experts come last in a mixture, rather than the one for all samples.
        shared_list: Whether all layers have the experts of the first one.
        calls: How often a layer calls its mixture.
        direct: Whether a mixture returns the output of one expert, rather than a sum.
        rare: Whether a rank often calls no expert of a layer, from the first forward on.
        late: Whether no rank calls an expert of the second layer in the first forwards. Set it with ``rare``.
        experts_first: Whether a mixture registers its experts before the modules that it calls before them.
        frozen: Whether all parameters but those of experts and of the head are frozen.
        freezes: Whether all parameters but those of the head are frozen after ``initialize``.
        branches: Whether the model ends with one of two branches, in another list that is not called before.
        drops: Whether each rank drops layers, and all experts of layers, after the first steps.
        losses: The order in which the losses of a micro-step are run backward. All are computed before.
        plain: Whether the loop calls ``loss.backward()``.
        keeps: Whether the loop keeps a loss of every other step that is never run backward.
    """

    layers: int = 3
    of_layer: Call = plainly
    of_mixture: Call = plainly
    of_expert: Call = plainly
    shared_first: bool = False
    shared_list: bool = False
    calls: int = 1
    direct: bool = False
    rare: bool = False
    late: bool = False
    experts_first: bool = False
    frozen: bool = False
    freezes: bool = False
    branches: bool = False
    drops: bool = False
    losses: tuple[int, ...] = (0,)
    plain: bool = False
    keeps: bool = False


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*sizes) for sizes in ((WIDTH, 32), (WIDTH, 32), (32, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Two experts for each sample, which are drawn at random, and one for all samples."""

    def __init__(self, style: Style, experts: nn.ModuleList | None) -> None:
        super().__init__()
        self.style = style
        experts = experts or nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        if style.experts_first:
            self.experts = experts
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        if not style.experts_first:
            self.experts = experts
        self.shared = Expert()

    def forward(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = self.shared(x) if self.style.shared_first else torch.zeros_like(x)
        if self.style.direct:
            return self.experts[int(drawn[0, 0])](x)  # type: ignore[no-any-return]
        for number, expert in enumerate(self.experts):
            rows = (drawn == number).any(-1).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, self.style.of_expert(expert, x[rows]) * weights[rows, :, number, None])
        return out if self.style.shared_first else out + self.shared(x)


class Layer(nn.Module):
    def __init__(self, style: Style, experts: nn.ModuleList | None) -> None:
        super().__init__()
        self.style, self.norm, self.mixture = style, nn.LayerNorm(WIDTH), Mixture(style, experts)

    def forward(self, x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        for call in range(self.style.calls):
            x = x + self.style.of_mixture(self.mixture, self.norm(x), (drawn + call) % NUM_EXPERTS if call else drawn)
        return x


class ExpertsLM(nn.Module):
    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style, self.num_forwards, self.rank = style, 0, 0
        self.tok = nn.Embedding(VOCAB, WIDTH)
        experts = None
        self.layers = nn.ModuleList()
        for _ in range(style.layers):
            self.layers.append(Layer(style, experts))
            experts = self.layers[0].mixture.experts if style.shared_list else None
        if style.branches:
            self.branches = nn.ModuleList(Expert() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if style.frozen:
            for name, param in self.named_parameters():
                param.requires_grad_(".experts." in name or name.startswith("head."))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        drops = self.style.drops and self.num_forwards > 2
        x = self.tok(ids)
        for number, layer in enumerate(self.layers):
            if drops and (self.num_forwards + self.rank + number) % 4 == 0:
                continue
            drawn_here = drawn[number]
            if drops and (self.num_forwards + self.rank) % 3 == number:
                drawn_here = torch.full_like(drawn_here, -1)
            is_late = self.style.late and number == 1 and self.num_forwards <= 2
            if self.style.rare and (is_late or (self.num_forwards * 2 + self.rank + number) % 3):
                drawn_here = torch.full_like(drawn_here, -1)
            x = self.style.of_layer(layer, x, drawn_here)
        if self.style.branches:
            x = x + self.branches[(self.num_forwards + self.rank) % 2](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def draw(step: int, rank: int, samples: int, layers: int) -> torch.Tensor:
    """Two different experts for each layer and sample: (layers, samples, 2)."""
    generator = torch.Generator().manual_seed(10**6 + 1000 * step + rank)
    return torch.rand(layers, samples, NUM_EXPERTS, generator=generator).topk(2, -1).indices


@contextlib.contextmanager
def on_transport(transport: str) -> Iterator[dict[str, Any]]:
    """Use a transport: "shm", "gloo" or "nccl". A rank that waits for others to read its gradients fails.

    Yields:
        The section ``comm`` of the configuration.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise such a rank takes more memory on the CPU, after it has waited. With NCCL it would wait for ever.
        patch.setattr(buffer_pool, "REUSE_TIMEOUT_S", 60.0)
        if transport == "nccl":
            use_nccl_transport(patch)
        yield {"timeout_seconds": 20} | ({"transport": transport} if transport != "nccl" else {})


def start(settings: dict[str, Any], style: Style) -> zeroengine.Engine:
    """An engine that trains experts."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = build(partial(ExpertsLM, style))
    engine = zeroengine.initialize(model, config=settings)
    model.rank = engine.rank
    if style.freezes:
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("head."))
    return engine


def train(transport: str, settings: dict[str, Any], style: Style, steps: int) -> list[float]:
    """Each step's loss of this rank."""
    with on_transport(transport) as comm:
        engine = start(settings | {"comm": comm}, style)
        losses: list[float] = []
        kept = None
        for step in range(steps):
            if style.keeps and step % 2:
                kept = engine(*batch(step, engine.rank, 1), draw(step, engine.rank, 1, style.layers))
            if step % 3 == 2:
                with torch.no_grad():
                    engine(*batch(step, engine.rank, 1), draw(step, engine.rank, 1, style.layers))
            for micro in range(int(engine.config.gradient_accumulation_steps)):
                number = step * 7 + micro
                found = []
                for part in range(len(style.losses)):
                    # Among many samples some use every expert, so this rank is complete where others are not.
                    samples = 8 if not number or (number + engine.rank + part) % 3 == 0 else 1
                    drawn = draw(number + 500 * part, engine.rank, samples, style.layers)
                    found.append(engine(*batch(number + 500 * part, engine.rank, samples), drawn))
                for part in style.losses:
                    found[part].backward() if style.plain else engine.backward(found[part])
                engine.step()
            losses += [loss.item() for loss in (*found, kept) if loss is not None]
        engine.close()
    return losses


def compare(
    transport: str, units: list[str], steps: int, more: dict[str, Any], style: Style
) -> list[tuple[float, float]]:
    """Pairs of losses, of stage 0 and of stage 3, that differ."""
    plain = {key: value for key, value in more.items() if key != "zero_optimization"}
    expected = train(transport, config(0, units=units, **plain), style, steps)
    # Without prefetching a gather waits for the ranks that come to it last.
    more = more | {"zero_optimization": {"prefetch_bucket_size": 0, **more.get("zero_optimization", {})}}
    losses = train(transport, config(3, units=units, **more), style, steps)
    # Stage 0 adds all backwards of a rank before it adds ranks. All-reduces of Gloo have an order of their own.
    has_several = "gradient_accumulation_steps" in more or len(style.losses) > 1
    tolerance = 1e-5 if transport == "nccl" or has_several else 0.0
    return [pair for pair in zip(expected, losses, strict=True) if abs(pair[0] - pair[1]) > tolerance]
