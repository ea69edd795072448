"""What each state of an engine holds on this rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes that an engine holds on this rank now, by state. ``str`` of it is a table for people."""

    device: str
    parameters: int  # in the compute dtype: shards, or whole where the parameter degree is 1
    gradients: int
    master: int  # fp32 masters, where the compute dtype is lower
    optimizer: int  # moments
    buckets: int  # gradients on their way
    gathered: int  # full buffers of partitioned units that are whole right now

    @property
    def total(self) -> int:
        return sum(value for name, value in asdict(self).items() if name != "device")

    @property
    def states(self) -> int:
        """What the table of ZeRO, section 5, counts: parameters, gradients, master and optimizer."""
        return self.parameters + self.gradients + self.master + self.optimizer

    def __str__(self) -> str:
        rows = [(name, value) for name, value in asdict(self).items() if name != "device"]
        lines = [f"{name:<12}{value / 2**20:>12,.1f} MiB" for name, value in [*rows, ("total", self.total)]]
        return "\n".join([f"on {self.device}", *lines])
