"""Steps that are skipped because their loss or norm lies far from those of the steps before.

The loss and the norm of a step are the same on all ranks, and in fp32 on CPUs at every stage, and so is what follows
from them. They are judged where they are, so that nothing waits for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroengine.config.skip_steps import SkipSteps
from zeroengine.optim.step_result import OUTLIER

# Values that differ from their mean by this share of it do so by rounding.
ROUNDING = 1e-6


class OutlierSteps:
    """The window of the latest steps, and which steps are outliers.

    Args:
        config: The section ``skip_steps``.

    Attributes:
        judges_loss: Whether the loss is judged.
        world_independent: Its state loads on any number of ranks.
    """

    world_independent = True

    def __init__(self, config: SkipSteps) -> None:
        self._sigma, self._window = config.sigma, config.window
        self.judges_loss, self._judges_norm = "loss" in config.of, "norm" in config.of
        # The losses and the norms of the latest steps that were not skipped, each at the number of its step among these
        # modulo the window; and how many there were.
        self._values = torch.zeros(2, config.window, dtype=torch.float64, device="cpu")
        self._count = torch.zeros(1, dtype=torch.int64, device="cpu")

    def judge(self, factor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return ``factor`` with ``OUTLIER`` as the third value, if the step is one. Nothing waits for the device.

        Args:
            factor: The three values of ``GradientFactor``, float64.
            loss: The mean loss of the step, 0-d float64 on the same device.
        """
        self._to(factor.device)
        latest = torch.stack([loss, factor[1]])
        num_known = self._count.clamp(max=self._window)
        is_known = torch.arange(self._window, device=factor.device) < num_known
        mean = (self._values * is_known).sum(1) / num_known
        deviations = (self._values - mean.unsqueeze(1)) * is_known
        limit = self._sigma * (deviations.square().sum(1) / (num_known - 1)).sqrt() + ROUNDING * mean.abs()
        # What is no number is not near the mean either.
        is_far = ((latest - mean).abs() <= limit).logical_not()
        judged = torch.stack([is_far[index] for index, is_judged in self._judged() if is_judged]).any()
        is_outlier = judged & (num_known[0] >= self._window // 2)
        is_skipped = is_outlier | (factor[2] != 0)
        place = (self._count % self._window).expand(2, 1)
        self._values.scatter_(1, place, torch.where(is_skipped, self._values.gather(1, place), latest.unsqueeze(1)))
        self._count += is_skipped.logical_not()
        code = torch.where(is_outlier & (factor[2] == 0), OUTLIER, factor[2])
        return torch.cat([factor[:2], code.view(1)])

    def _judged(self) -> tuple[tuple[int, bool], ...]:
        return (0, self.judges_loss), (1, self._judges_norm)

    def _to(self, device: torch.device) -> None:
        if self._values.device != device:
            self._values, self._count = self._values.to(device), self._count.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the window as checkpoints keep it: the latest steps, the oldest first, as pairs of loss and norm."""
        count = int(self._count)
        first = max(0, count - self._window)
        pairs = self._values.t().tolist()
        return {"steps": [pairs[number % self._window] for number in range(first, count)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the latest steps of a ``state_dict``, as many as the window holds."""
        pairs = state["steps"][-self._window :]
        self._values.zero_()
        if pairs:
            self._values[:, : len(pairs)] = torch.tensor(pairs, dtype=torch.float64).t()
        self._count.fill_(len(pairs))
