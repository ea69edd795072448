"""What each state of an engine holds on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STATES = ("parameters", "gradients", "master", "optimizer")
WORKING = ("buckets", "gathered", "staging")


@dataclass(frozen=True)
class Memory:
    """Bytes that an engine holds on this rank now, by state. ``str`` of it is a table for people."""

    device: str
    parameters: int  # in the compute dtype: shards, or whole where the parameter degree is 1
    gradients: int
    master: int  # fp32 masters, where the compute dtype is lower
    optimizer: int  # moments
    buckets: int  # gradients on their way
    gathered: int  # full buffers of units that are released between uses, and whole right now
    staging: int = 0  # buffers between NVMe and the computation
    checkpoint: int = 0  # the copy in CPU memory that checkpoint.async_save writes from, kept for the next
    nvme: Mapping[str, int] = field(default_factory=dict)  # of the four states, what is there and not in memory

    @property
    def total(self) -> int:
        """In the device's memory."""
        in_cpu = self.checkpoint if self.device == "cpu" else 0
        return sum(getattr(self, name) for name in (*STATES, *WORKING)) + in_cpu

    @property
    def states(self) -> int:
        """What the table of ZeRO, section 5, counts, wherever it is: parameters, gradients, master and optimizer."""
        return sum(getattr(self, name) for name in STATES) + sum(self.nvme.values())

    def __str__(self) -> str:
        away = dict(self.nvme) if any(self.nvme.values()) else None
        lines = [f"on {self.device}" if away is None else f"{f'on {self.device}':<12}{'memory':>16}{'NVMe':>16}"]
        for name in (*STATES, *WORKING, "checkpoint", "total"):
            if (name == "staging" and away is None) or (name == "checkpoint" and not self.checkpoint):
                continue
            line = f"{name:<12}{getattr(self, name) / 2**20:>12,.1f} MiB"
            if away is not None:
                there = sum(away.values()) if name == "total" else away.get(name, 0)
                line += f"{there / 2**20:>12,.1f} MiB"
            lines.append(line)
        return "\n".join(lines)
