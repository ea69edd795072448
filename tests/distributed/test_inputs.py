"""Whatever a model takes and returns."""

from __future__ import annotations

import collections
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.distributed.models import WIDTH, Block
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Adapted, Net, features
from tests.distributed.training import Task, check_every_stage, make_engine, start
from zeroengine.utils.tensors import tensors_in


class Pair(NamedTuple):
    x: torch.Tensor
    scale: float


@dataclass
class Hidden:
    x: torch.Tensor
    seen: list[torch.Tensor] = field(default_factory=list)
    note: str = ""


class Takes(Block):
    """Positional and keyword arguments, a dict, a named tuple and a dataclass in; nested ones out."""

    def forward(  # type: ignore[override]
        self, hidden: Hidden, pair: Pair, *, extra: dict[str, Any], mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        x = super().forward(hidden.x) * pair.scale + extra["deep"][0]["x"]
        x = x if mask is None else torch.where(mask, x, 0.0)
        return {"hidden": Hidden(x, [*hidden.seen, x.mean()]), "others": (None, [x.sum() * 1e-3, "text"]), "count": 3}


class Contained(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Takes() for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        hidden, total = Hidden(self.stem(x)), x.new_zeros(())
        for i, block in enumerate(self.blocks):
            out = block(hidden, Pair(x, 0.5 + i), extra={"deep": [{"x": x}]}, mask=mask)
            hidden, total = out["hidden"], total + out["others"][1][0]
        return self.loss(hidden.x) + total + torch.stack(hidden.seen).square().sum()


def masked(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    (x,) = features(step, rank)
    return x, (x > 0 if step % 2 else None)


def test_containers_and_keyword_arguments_between_modules_train_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=Contained, data=masked))


class Opaque:
    """A class that nobody outside can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.hidden = x


class TakesOpaque(Block):
    def forward(self, carrier: Opaque) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(carrier.hidden))


class Carried(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesOpaque() for _ in range(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        carrier = Opaque(self.stem(x))
        for block in self.blocks:
            carrier = block(carrier)
        return self.loss(carrier.hidden)


def test_tensors_in_objects_of_unknown_classes_train_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=Carried, data=features))


class AdaptedOpaque(Adapted):
    """Its adapters have their gradients before its frozen layer has passed its own on."""

    def forward(self, carrier: Opaque) -> Opaque:  # type: ignore[override]
        hidden = torch.tanh(self.base(carrier.hidden))
        return Opaque(hidden + self.up(self.down(hidden)))


class CarriedAdapters(Carried):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedOpaque() for _ in range(3))


class HalfCarried(CarriedAdapters):
    """Opaque inputs, but outputs that one can see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for block in self.blocks:
            x = block(Opaque(x))
        return self.loss(x)


class Unpacks(AdaptedOpaque):
    def forward(self, carrier: Opaque) -> torch.Tensor:  # type: ignore[override]
        return super().forward(carrier).hidden


def half_carried() -> nn.Module:
    model = HalfCarried()
    model.blocks = nn.ModuleList(Unpacks() for _ in range(3))
    return model


@pytest.mark.parametrize("factory", [CarriedAdapters, half_carried])
def test_frozen_layers_with_hidden_inputs_train_as_plain_pytorch(factory: Any) -> None:
    check_every_stage(Task(factory=factory, data=features))


class SideOutput(Block):
    """An auxiliary loss by the side, as routers of experts have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = self.norm(x).square().mean() * self.up.weight.abs().mean()
        return super().forward(x)


class Sided(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SideOutput() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        loss = super().forward(x)
        return loss + torch.stack([block.auxiliary for block in self.blocks]).sum()


def test_losses_stored_in_module_attributes_train_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=Sided, data=features))


class Widened(nn.Module):
    """Looks at dtypes on the way: which inputs were cast for bf16 compute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.seen = (args, kwargs)
        return {"loss": self.linear(args[0]["x"]).float().square().mean()}


def cast_inputs() -> dict[str, Any]:
    start()
    engine = make_engine(Task(factory=Widened), 2, bf16={"enabled": True})
    x, ids = torch.ones(2, WIDTH), torch.arange(3)
    ordered = collections.OrderedDict(x=x, ids=ids)
    default = collections.defaultdict(list, x=x, nothing=[])
    hidden = Hidden(x, [ids, x], "kept")
    given = ({"x": x, "half": x.half()}, Pair(x, 2.0), ordered, default, hidden, [x, (ids, "text", None)])
    loss = engine(*given, keyword=x, namespace=types.SimpleNamespace(x=x))["loss"]
    engine.backward(loss)
    engine.step()
    args, kwargs = engine.module.seen
    assert hidden.x is x and given[0]["x"] is x, "the caller's containers stay as they are"
    return {
        "types": [type(a) is type(g) for a, g in zip(args, given, strict=True)],
        "default": args[3]["absent"],
        "cast": {str(t.dtype) for t in tensors_in((args, kwargs)) if t.is_floating_point()},
        "kept": {str(t.dtype) for t in (args[2]["ids"], args[4].seen[0], args[5][1][0])},
        "values": (args[1].scale, args[4].note, args[5][1][1:]),
    }


def test_bf16_casts_floating_inputs_in_any_container_and_keeps_its_type() -> None:
    found = run_ranks(2, cast_inputs)[0]
    assert found == {
        "types": [True] * 6,
        "default": [],
        "cast": {"torch.bfloat16"},
        "kept": {"torch.int64"},
        "values": (2.0, "kept", ("text", None)),
    }
