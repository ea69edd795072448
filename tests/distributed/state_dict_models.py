"""Models whose ``state_dict()`` is more, or other, than their parameters and buffers by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WIDTH = 8


class Scaled(nn.Module):
    """Has extra state, a buffer that is not saved, and an extra state that shows a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.history: dict[str, Any] = {"calls": 0, "amax": torch.zeros(3), "recipe": ("e4m3", 1.5, None)}

    def get_extra_state(self) -> dict[str, Any]:
        return {**self.history, "amax": self.history["amax"] + self.history["calls"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = {**state, "amax": state["amax"] - state["calls"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history["calls"] += 1
        return x + self.down(torch.relu(self.up(x * self.mean)))


class Renamed(nn.Module):
    """Saves ``weight`` as ``kernel``, and drops what can be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.dropped = nn.Parameter(torch.randn(WIDTH))
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")
        del state[f"{prefix}dropped"]

    @staticmethod
    def _rename_back(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        state.setdefault(f"{prefix}dropped", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.frozen + self.dropped


class Fused(nn.Module):
    """Saves the transposed and joined values of its parameters, as JAX would have them."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self._register_state_dict_hook(self._fuse)
        self._register_load_state_dict_pre_hook(self._split)

    @staticmethod
    def _fuse(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        q, k = (state.pop(f"{prefix}{name}.weight") for name in "qk")
        state[f"{prefix}qk"] = torch.cat([q, k]).t()

    def _split(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}qk" in state:
            for name, part in zip("qk", state.pop(f"{prefix}qk").t().chunk(2), strict=True):
                state[f"{prefix}{name}.weight"] = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.q(x) * self.k(x)


class Overriding(nn.Linear):
    """Saves copies of its parameters, and another tensor, by a method of its own."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.data.clone()
        destination[f"{prefix}bias"] = self.bias
        destination[f"{prefix}norm"] = self.weight.norm()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.pop(f"{prefix}norm", None)
        super()._load_from_state_dict(state, prefix, *rest)


class Peculiar(nn.Module):
    """All of them, with parametrizations, a tied weight and torch's wrapper for activation checkpoints."""

    def __init__(self, wrapped: bool = True) -> None:
        super().__init__()
        wrap = checkpoint_wrapper if wrapped else lambda module: module
        self.blocks = nn.ModuleList([wrap(Scaled()) for _ in range(3)])
        self.renamed, self.fused, self.overriding = Renamed(), Fused(), Overriding(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old_normed = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.head, self.tied = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.old_normed(self.normed(self.overriding(self.fused(self.renamed(x)))))
        return self.tied(self.norm(self.head(x))).square().mean()
