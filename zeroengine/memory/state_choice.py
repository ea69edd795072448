"""A choice of the stage and of the places of offloaded states."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from zeroengine.config import Config

# Places in the order of their cost in time.
PLACES = ("none", "cpu", "nvme")
SECTIONS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class StateChoice:
    """A choice of where states are: the stage and the devices of the two offload sections."""

    stage: int
    offload_optimizer: str = "none"
    offload_param: str = "none"

    @property
    def cost(self) -> tuple[int, int, int]:
        """The key that choices are sorted by: less offload first, then the lower stage."""
        optimizer, param = (PLACES.index(place) for place in (self.offload_optimizer, self.offload_param))
        return optimizer + param, param, self.stage

    def num_changes(self, other: StateChoice) -> int:
        """Return how many settings differ."""
        return sum(a != b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))

    def applied(self, config: Config) -> Config:
        """Return ``config`` with this choice."""
        zero = config.zero_optimization
        sections = {name: getattr(zero, name).model_copy(update={"device": getattr(self, name)}) for name in SECTIONS}
        return config.model_copy(
            update={"zero_optimization": zero.model_copy(update={"stage": self.stage, **sections})}
        )

    def written(self, config: Config) -> str:
        """Return what to write in a configuration, as far as it differs from ``config``."""
        zero = config.zero_optimization
        keys: dict[str, Any] = {} if zero.stage == self.stage else {"stage": self.stage}
        for name in SECTIONS:
            section, place = getattr(zero, name), getattr(self, name)
            if section.device != place:
                path = {"nvme_path": section.nvme_path or "/a/folder"} if place == "nvme" else {}
                keys[name] = {"device": place, **path}
        return f'"zero_optimization": {json.dumps(keys)}'

    def in_words(self) -> str:
        """Return the stage and the offloads."""
        offloads = [f"{name} {place}" for name in SECTIONS if (place := getattr(self, name)) != "none"]
        return " with ".join([f"stage {self.stage}", *([" and ".join(offloads)] if offloads else [])])
