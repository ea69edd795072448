"""The losses of a step, and their weights: a loss may be the mean of many tokens on one rank, and of few on another."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError

MIXED_LOSSES = (
    "losses with and without a weight in one step, whose mean is then not defined: give each loss of a step its "
    "weight, the number of tokens or samples that it is the mean of, by engine.backward(loss, weight=n) or "
    "engine.scale(loss, weight=n).backward()"
)
# On the host, or 0-d float64 on another device.
Weight = float | torch.Tensor


class StepLosses:
    """The losses of the step in progress, and their weights, on this rank.

    The gradient of a step is the sum of weights times gradients, over all backwards of all ranks, divided by the sum of
    the weights. The step sums the weights with the norm.

    Args:
        agree_on: Returns the largest of the numbers that the ranks give it. A collective. None: gradients have a wide
            range, so that they may be as large as the weights make them.

    Attributes:
        is_weighted: Whether losses of the step have weights.
        is_plain: Whether the step has gradients of losses without weight, or assigned ones.
        number: The sum of the weights that are on the host.
        on_device: The sum of those that are on another device: 0-d float64. None: there are none.
        total: The sum of the losses, each times its weight, if it has one: 0-d float64. None: none was noted.
    """

    def __init__(self, agree_on: Callable[[float], float] | None) -> None:
        self._agree_on = agree_on
        # Weights are divided by it, a power of two, so that gradients of fp16 do not overflow. 0: not known yet.
        self._unit = 0.0 if agree_on is not None else 1.0
        # That of the next step.
        self._next_unit = self._unit
        self.forget()

    def forget(self) -> None:
        """Begin the next step."""
        self._unit = self._next_unit
        self.is_weighted = self.is_plain = False
        self.number = 0.0
        self.on_device: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        # The weights of the losses in it, also of those whose gradients were dropped.
        self._noted: Weight = 0.0

    def forget_weights(self) -> None:
        """Forget the weights of losses all of whose gradients were dropped."""
        self.is_weighted = self.is_plain = False
        self.number, self.on_device = 0.0, None

    def check(self, weight: Any) -> None:
        """Check the weight of a loss.

        Args:
            weight: A number of at least 0, or a tensor of one such number. None: the loss has no weight.

        Raises:
            ZeroEngineError: It is something else, or the step has losses with a weight and others without.
        """
        if weight is not None:
            check_weight(weight)
        if self.is_weighted if weight is None else self.is_plain:
            raise ZeroEngineError(MIXED_LOSSES)

    def factor_of(self, weight: Any) -> Weight:
        """Return a weight that passes ``check`` as the factor of its loss. In fp16 the first call is a collective."""
        if not self._unit:
            assert self._agree_on is not None
            # Where all weights are 0, the next step agrees.
            self._next_unit = _unit_of(self._agree_on(float(weight)))
            self._unit = self._next_unit or 1.0
        if isinstance(weight, torch.Tensor) and weight.device.type != "cpu":
            # The user may change the tensor later.
            return weight.detach().to(torch.float64, copy=True).view(()) / self._unit
        return float(weight) / self._unit

    def add(self, factor: Weight) -> None:
        """Count the weight of a loss whose backward has a first gradient.

        Raises:
            ZeroEngineError: The step has gradients of losses without weight.
        """
        if self.is_plain:
            raise ZeroEngineError(MIXED_LOSSES)
        self.is_weighted = True
        if not isinstance(factor, torch.Tensor):
            self.number += factor
        else:
            self.on_device = factor if self.on_device is None else self.on_device + factor

    def adapt(self, mean: float) -> None:
        """Take over how large the weights of a step are, in fp16, for those of the next one.

        Args:
            mean: The mean over the ranks of what ``number`` and ``on_device`` are the sum of.
        """
        if self._agree_on is not None and self.is_weighted:
            self._next_unit = _unit_of(mean * self._unit) or self._next_unit

    def add_to(self, values: torch.Tensor) -> None:
        """Add what is on the device to the last of ``values``, which holds ``number``."""
        if self.on_device is not None:
            values[-1] += self.on_device

    def weights(self, device: torch.device) -> torch.Tensor:
        """Return the sum of the weights of this rank: 1-D float64, of one element, on ``device``."""
        values = torch.tensor([self.number], dtype=torch.float64, device=device)
        self.add_to(values)
        return values

    def note(self, loss: torch.Tensor, factor: Weight | None) -> None:
        """Add what a backward was given, before it is scaled."""
        # The copy is made now, because the user may change the tensor afterwards.
        value = loss.detach().to(torch.float64, copy=True).view(())
        if factor is not None:
            # The mean over nothing, which does not count, is no number.
            value = torch.where(torch.as_tensor(factor, device=value.device) == 0, 0.0, value * factor)
            self._noted = self._noted + factor
        self.total = value if self.total is None else self.total + value

    def mean(self, micro_steps: int) -> torch.Tensor | None:
        """Return the mean loss of this rank, and its weight in the mean over the ranks: two elements, float64.

        Args:
            micro_steps: The number of micro-steps that the gradient is the mean of, unless losses have weights.

        Returns:
            None if no loss was noted, as where the loop calls ``loss.backward()`` itself.
        """
        if self.total is None:
            return None
        if not self.is_weighted:
            return torch.stack([self.total / micro_steps, torch.ones_like(self.total)])
        weights = torch.as_tensor(self._noted).to(self.total)
        return torch.stack([torch.where(weights == 0, 0.0, self.total / weights), weights])


def _unit_of(weight: float) -> float:
    return 2.0 ** math.ceil(math.log2(weight)) if 0 < weight < math.inf else 0.0


def weighted(loss: torch.Tensor, factor: Weight) -> torch.Tensor:
    """Return ``loss`` times ``factor``, at least in fp32, because the product may overflow fp16."""
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    return loss * (factor.to(loss.dtype) if isinstance(factor, torch.Tensor) else factor)


def check_weight(weight: Any) -> None:
    """Check that ``weight`` is a number of at least 0, or a tensor of one such number.

    Raises:
        ZeroEngineError: It is something else. What is on another device than the CPU is not read, and so not checked.
    """
    is_number = isinstance(weight, numbers.Real) or (isinstance(weight, torch.Tensor) and weight.numel() == 1)
    is_known = is_number and not (isinstance(weight, torch.Tensor) and weight.device.type != "cpu")
    if not is_number or (is_known and not 0 <= float(weight) < math.inf):
        is_shaped = isinstance(weight, torch.Tensor) and not is_number
        what = f"shape {tuple(weight.shape)}" if is_shaped else repr(weight)
        raise ZeroEngineError(
            f"weight={what}: write the number of tokens or samples that the value is the mean of, such as "
            "weight=(labels != -100).sum(); 0 for a batch that does not count"
        )
