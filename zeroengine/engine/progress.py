"""The lines that say how a run is set up and how it goes: one at its start, and others by ``steps_per_print``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.config.degrees import STATES as DEGREE_STATES
from zeroengine.engine.run_description import planned_steps
from zeroengine.memory.state_memory import StateMemory
from zeroengine.ops import kernels_in_use
from zeroengine.optim.mixed_optimizer import describe_algorithms
from zeroengine.utils.formats import counted, format_byte_size, format_count, format_loss
from zeroengine.utils.tensors import HostCopy

log = logging.getLogger("zeroengine")


def announce(line: str) -> None:
    """Log ``line`` at INFO, or print it to stderr if the program has not configured logging.

    Without a configuration Python shows warnings alone, and this is none. ``logging.basicConfig`` or a level of the
    logger "zeroengine" makes the configuration decide.
    """
    if log.level == logging.NOTSET and not log.hasHandlers():
        print(line, file=sys.stderr, flush=True)
    else:
        log.info("%s", line)


def describe_start(
    model: nn.Module, state_memory: StateMemory, replica_ranks: int, num_replicas: int, device: torch.device
) -> str:
    """Return one line: the model, how it is partitioned, the bytes of a rank as planned, and the kernels."""
    version = sys.modules["zeroengine"].__version__
    zero, plans = state_memory.config.zero_optimization, state_memory.plans
    states = state_memory.requirement(state_memory.current()).states
    ranks = counted(replica_ranks, "rank")
    is_split = any(plan.is_split for plan in plans)
    if num_replicas > 1:
        ranks += " with the same slices" if is_split else f" in each of {num_replicas} replicas"
    how = f"stage {zero.stage} over {ranks}"
    if zero.degrees is not None:
        how = f"{', '.join(f'{state} over {getattr(zero.degrees, state)}' for state in DEGREE_STATES)} of {ranks}"
    total = sum(plan.numel for plan in plans)
    trainable = sum(plan.numel for plan in plans if plan.trainable)
    frozen = "" if trainable == total else f" ({format_count(trainable)} trainable)"
    if is_split:
        frozen += " of each rank"
    of_states = ", ".join(f"{name} {format_byte_size(n)}" for name, n in states.device.items() if n)
    elsewhere = {"CPU memory": states.cpu_total, "NVMe": sum(states.nvme.values())}
    more = "".join(f"; {format_byte_size(nbytes)} in {place}" for place, nbytes in elsewhere.items() if nbytes)
    algorithms = f"; {text}" if (text := describe_algorithms(state_memory.optimizer)) else ""
    return (
        f"zeroengine {version}: {type(model).__name__}, {format_count(total)} parameters{frozen} in "
        f"{counted(len(plans), 'unit')}, {how}, {format_byte_size(states.device_total)} a rank: "
        f"{of_states}{more}{algorithms}; kernels: {kernels_in_use(device)}"
    )


class ProgressPrinter:
    """Prints a line every ``steps_per_print`` updates. Make one on rank 0 only.

    The loss is copied to the host when a step is issued, and read when the result of that step is known, so it makes
    nothing wait.

    Args:
        config: The resolved configuration.
        world_size: The number of ranks. Of several, the loss is that of rank 0.
    """

    def __init__(self, config: Config, world_size: int) -> None:
        assert config.steps_per_print is not None
        self._interval, self._total = config.steps_per_print, planned_steps(config)
        self._loss_name = "loss" if world_size == 1 else "loss of rank 0"
        # The time since which updates are counted, and the number of updates at that time.
        self._since: tuple[float, int] | None = None

    def count_update(
        self,
        number: int,
        rates: Sequence[float | torch.Tensor],
        grad_norm: float | None,
        loss: HostCopy | None,
    ) -> None:
        """Print a line if it is time to. The result of the issued step is known now.

        Args:
            number: The number of updates so far.
            rates: The learning rate of each param group.
            grad_norm: The norm of the gradient.
            loss: See ``IssuedStep``.
        """
        now = time.monotonic()
        # A load changes the number. The first interval has no start of its first step.
        if self._since is None or self._since[1] >= number:
            self._since = (now, number)
        if number % self._interval:
            return
        parts = []
        if loss is not None:
            parts.append(f"{self._loss_name} {format_loss(loss.read()[0])}")
        parts.append(f"lr {', '.join(f'{rate:.3g}' for rate in rates)}")
        parts.append(f"grad norm {grad_norm:.4g}")
        seconds, updates = now - self._since[0], number - self._since[1]
        if updates and seconds > 0:
            rate = updates / seconds
            parts.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s a step")
        self._since = (now, number)
        total = f"/{self._total}" if self._total else ""
        print(f"step {number}{total}: {', '.join(parts)}", flush=True)
