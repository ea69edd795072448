"""The seconds of a training step, from what is traced and what the machine achieves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a rank. All but ``compute`` count what the computation does not hide.

    Attributes:
        compute: Forwards and backwards of all micro-steps.
        gather: Exposed all-gathers of parameters.
        reduce: Exposed reductions of gradients.
        update: The norm of the gradient and the optimizer's update.
        offload: Exposed transfers between the device, the host and the disk.
    """

    compute: float
    gather: float
    reduce: float
    update: float
    offload: float

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute + self.gather + self.reduce + self.update + self.offload
