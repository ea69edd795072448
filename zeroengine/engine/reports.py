"""What a run reports of itself: the record of each step, events, and printed lines."""

from __future__ import annotations

from typing import Any

import torch

from zeroengine.comm.group import Group
from zeroengine.engine.monitoring import EngineMonitor, start_monitor
from zeroengine.engine.parts import EngineSetup
from zeroengine.engine.peak_rates import peak_flops_of
from zeroengine.engine.progress import ProgressPrinter
from zeroengine.monitor.forward_profile import ForwardProfiler
from zeroengine.monitor.profile_table import ProfiledRank
from zeroengine.monitor.record import EventKind
from zeroengine.monitor.timer import Timer
from zeroengine.utils.small_transfers import HostCopy


class Reports:
    """What reports on a run. Parts that nothing asks for are None.

    Args:
        monitor: Records each step.
        forward_profiler: Profiles one forward by module; on rank 0 only.
        progress: Prints a line from time to time; on rank 0 only.

    Attributes:
        timer: Times the kinds of work; it does nothing without a monitor.
    """

    def __init__(
        self, monitor: EngineMonitor | None, forward_profiler: ForwardProfiler | None, progress: ProgressPrinter | None
    ) -> None:
        self.monitor, self.forward_profiler, self.progress = monitor, forward_profiler, progress
        self.timer = Timer() if monitor is None else monitor.timer
        self._loss: torch.Tensor | None = None

    def note_loss(self, loss: torch.Tensor) -> None:
        """Add what a backward was given to the loss of the step."""
        if self.monitor is not None or self.progress is not None:
            # The copy is made now, because the user may change the tensor afterwards.
            value = loss.detach().to(torch.float64, copy=True).view(())
            self._loss = value if self._loss is None else self._loss + value

    def take_loss(self) -> HostCopy | None:
        """Return the loss of the step that was issued, of one element, and begin with that of the next step."""
        loss, self._loss = self._loss, None
        return None if loss is None else HostCopy(loss.view(1))

    def drop_gradients(self) -> None:
        """Forget the losses and the samples of the step in progress, which starts again."""
        self._loss = None
        if self.monitor is not None:
            self.monitor.forwards.drop()

    def event(self, kind: EventKind, step: int, text: str, **facts: Any) -> None:
        """Tell the monitor of an event, if there is a monitor. Rank 0's events count."""
        if self.monitor is not None:
            self.monitor.event(kind, step, text, **facts)


def start_reports(setup: EngineSetup, group: Group) -> Reports:
    """Start what the configuration asks for. A collective.

    Raises:
        ZeroEngineError: On every rank, if rank 0 cannot write the run folder.
    """
    config, monitor = setup.config, start_monitor(setup, group)
    profiler = progress = None
    if config.flops_profiler.enabled and group.rank == 0:
        peak = peak_flops_of(config, group.device)
        rank = ProfiledRank(group.world_size, config.train_micro_batch_size_per_gpu, peak)
        units = {plan.name for plan in setup.plans}
        profiler = ForwardProfiler(setup.model, config.flops_profiler, units, rank, group.device)
    if config.steps_per_print is not None and group.rank == 0:
        progress = ProgressPrinter(config, group.world_size)
    return Reports(monitor, profiler, progress)
