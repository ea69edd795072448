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
    put_off: Mapping[str, int] = field(default_factory=dict)  # of `gathered`: units that a tensor of yours shares
    staging: int = 0  # buffers between where states live and the computation
    checkpoint: int = 0  # the copy that checkpoint.async_save writes from, kept for the next; on a GPU see `cpu`
    cpu: Mapping[str, int] = field(default_factory=dict)  # beside a GPU: what is in CPU memory, by the names above
    nvme: Mapping[str, int] = field(default_factory=dict)  # of the four states, what is there and not in memory

    @property
    def total(self) -> int:
        """In the device's memory."""
        return sum(getattr(self, name) for name in (*STATES, *WORKING, "checkpoint"))

    @property
    def states(self) -> int:
        """What the table of ZeRO, section 5, counts, wherever it is: parameters, gradients, master and optimizer."""
        return sum(getattr(self, name) + self.cpu.get(name, 0) + self.nvme.get(name, 0) for name in STATES)

    def __str__(self) -> str:
        away = {name: of for name, of in (("CPU", self.cpu), ("NVMe", self.nvme)) if any(of.values())}
        here = "memory" if self.device == "cpu" else "GPU"
        heads = "".join(f"{name:>16}" for name in (here, *away))
        lines = [f"{f'on {self.device}':<12}{heads}" if away else f"on {self.device}"]
        for name in (*STATES, *WORKING, "checkpoint", "total"):
            if (name == "staging" and not away) or (
                name == "checkpoint" and not (self.checkpoint or self.cpu.get(name))
            ):
                continue
            line = f"{name:<12}{getattr(self, name) / 2**20:>12,.1f} MiB"
            for of in away.values():
                there = sum(of.values()) if name == "total" else of.get(name, 0)
                line += f"{there / 2**20:>12,.1f} MiB"
            lines.append(line)
            if name == "gathered":
                for unit, size in self.put_off.items():
                    lines.append(f"  of it, unit {unit}: {size / 2**20:,.1f} MiB, which a tensor shares")
        return "\n".join(lines)
