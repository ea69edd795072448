"""What a run reports of itself: the record of each step, events, and printed lines."""

from __future__ import annotations

import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeroengine.comm.group import Group
from zeroengine.comm.watchdog import host_name
from zeroengine.disk.queue import TransferTimes
from zeroengine.engine.forward_counts import ForwardCounts
from zeroengine.engine.progress import ProgressPrinter
from zeroengine.engine.run_description import describe_run, peak_flops_of
from zeroengine.engine.setup import EngineSetup
from zeroengine.monitor.collector import Collector, RankStep, TraceRequest
from zeroengine.monitor.forward_profile import ForwardProfiler
from zeroengine.monitor.observer import Observer
from zeroengine.monitor.profile_table import ProfiledRank
from zeroengine.monitor.record import EventKind, RunEvent
from zeroengine.monitor.run_folder import RUN_FOLDER_VARIABLE, RunFolder
from zeroengine.monitor.sink_threads import OpenSink, SinkThreads
from zeroengine.monitor.sinks.choose import asks_for_sinks, choose_sinks
from zeroengine.monitor.sinks.log_folder import LogFolder
from zeroengine.monitor.summary import MEDIA, STATES
from zeroengine.monitor.timer import Timer
from zeroengine.offload.placement import Placement
from zeroengine.optim.step_result import IssuedStep
from zeroengine.runtime.step_losses import Weight
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import counted
from zeroengine.utils.process_finalizer import finalize
from zeroengine.utils.tensors import HostCopy

log = logging.getLogger("zeroengine")

# The memory of the states seldom changes, and listing it takes longer than the rest of a record.
MEMORY_INTERVAL = 20


class Reports(Observer):
    """Reports on a run by its parts. Those that nothing asks for are None.

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

    def forward_began(self, args: Any, kwargs: Any) -> None:
        """Record the step that has ended, and count the forward."""
        if self.monitor is not None:
            self.monitor.begin_step()
            self.monitor.forwards.begin((args, kwargs))

    def forward_ended(self, completed: bool) -> None:
        """Count the forward if it has completed."""
        if self.monitor is not None:
            self.monitor.forwards.end(completed)

    def loss_noted(self, loss: torch.Tensor, weight: Weight | None) -> None:
        """Record the step that has ended."""
        if self.monitor is not None:
            self.monitor.begin_step()

    def gradients_dropped(self) -> None:
        """Forget the samples of the step in progress."""
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


def start_monitor(setup: EngineSetup, group: Group) -> EngineMonitor | None:
    """Return the monitor of an engine, or None if nothing asks for one. A collective.

    Args:
        setup: What the engine is made from.
        group: The ranks of the engine.

    Raises:
        ZeroEngineError: On every rank, if rank 0 cannot write the run folder.
    """
    model, config, has_sinks = setup.model, setup.config, asks_for_sinks(setup.config)
    # The run folder of zero-launch.
    path, enabled = config.monitor.folder or os.environ.get(RUN_FOLDER_VARIABLE), config.monitor.enabled
    if enabled is None:
        enabled = has_sinks or bool(path) or config.trace.steps is not None
    if not enabled:
        if has_sinks and group.rank == 0:
            log.warning(
                '"monitor": {"enabled": false} leaves the loggers and tables of the configuration without records'
            )
        return None
    hosts = group.all_gather_object(host_name() or platform.node(), "to start the monitor")
    sinks: dict[str, OpenSink] = {}
    folder: Path | None = None
    with group.collective_errors("to start the monitor"):
        if group.rank == 0:
            run = describe_run(model, config, group, setup.plans, hosts)
            sinks = choose_sinks(config, run)
            if path:
                # The folder is opened now, so a wrong one is an error.
                run_folder = RunFolder(path, run)
                sinks["monitor.folder"], folder = lambda: run_folder, run_folder.path
    monitor = EngineMonitor(setup, group, sinks, folder)
    setup.undo.callback(monitor.close)
    stage = config.zero_optimization.stage
    monitor.event("start", 0, f"{type(model).__name__} starts on {counted(group.world_size, 'rank')} at stage {stage}")
    return monitor


class EngineMonitor:
    """Notes what happens in a step, and hands it to the collector when the step ends.

    Args:
        setup: What the engine is made from.
        group: The ranks of the engine.
        sinks: What opens the sinks that take the records, by name, on rank 0.
        folder: The run folder, on rank 0, if there is one.

    Attributes:
        timer: Times the kinds of work.
        forwards: Counts the samples, the tokens and the operations of forwards.
        folder: As given.
    """

    def __init__(self, setup: EngineSetup, group: Group, sinks: Mapping[str, OpenSink], folder: Path | None) -> None:
        config, units = setup.config, [plan.name for plan in setup.plans]
        self._device, self._rank, self.folder = group.device, group.rank, folder
        # Rank 0 writes the timeline.
        traces = Path(config.trace.folder or folder or ".")
        self._traces = LogFolder("trace", traces) if config.trace.steps and group.rank == 0 else None
        self.timer = Timer(units, group.device)
        # Ranks that are pretended have no peers to gather from.
        own_group = group.new_group("gloo", config.comm.timeout_seconds) if group.has_peers else None
        outputs = SinkThreads(sinks)
        self._collector = Collector(
            own_group, group.rank, units, self.timer.slot_names, peak_flops_of(config, group.device), outputs
        )
        # An engine that is not closed ends its monitor when it is deleted, or when the process exits.
        self._finalizer = finalize(self, self._collector.close_at_exit)
        outputs.before_exit = self._finalizer
        self._last_step = 0
        self.forwards = ForwardCounts(setup)
        self._memory: dict[str, float] = {}
        self._disk_traffic = (0, 0)
        steps = config.trace.steps
        self._traced_steps = range(steps[0], steps[-1] + 1) if steps else range(0)
        self._handles: list[Any] = []
        self.timer.trace(1 in self._traced_steps)

    # -- within a step ----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Record the step that has ended, at the first work of the next one."""
        self._collector.begin_step()

    def log(self, values: Mapping[str, Any]) -> None:
        """Add the user's numbers to the step in progress, or to the one that has ended."""
        self._collector.user.update({name: _later(value) for name, value in values.items()})

    def event(self, kind: EventKind, step: int, text: str, **facts: Any) -> None:
        """Tell the sinks of an event. Rank 0's count."""
        # A load may go back to an earlier step.
        self._last_step = step if kind == "resume" else max(step, self._last_step)
        if self._rank == 0:
            self._collector.put(RunEvent(time.time(), self._last_step, kind, text, facts))

    # -- the end of a step ------------------------------------------------------------------------

    def end_step(
        self, issued: IssuedStep, memory: Callable[[], Any], placement: Placement, units: Sequence[Unit]
    ) -> None:
        """Hand over the step that has just ended. Call it on every rank.

        Args:
            issued: The step.
            memory: Returns ``engine.memory()``.
            placement: Knows the disks.
            units: The units.
        """
        # A step of assigned gradients begins without a forward.
        self._collector.begin_step()
        disk_traffic = placement.disk_traffic
        times = self.timer.end_step()
        if issued.number % MEMORY_INTERVAL == 1 or not self._memory:
            held = memory()
            kinds = {"device": vars(held), "cpu": held.cpu, "nvme": held.nvme}
            # The names of ``RankRow``.
            self._memory = {f"{kind}.{state}": float(kinds[kind].get(state, 0)) for kind in MEDIA for state in STATES}
        received = self.timer.received
        numbers: dict[str, float | None] = {
            **{f"{kind}_bytes": nbytes for kind, nbytes in received.items()},
            "disk_read_bytes": disk_traffic[0] - self._disk_traffic[0],
            "disk_write_bytes": disk_traffic[1] - self._disk_traffic[1],
            **self.forwards.take(),
            "peak": _peak_bytes(self._device),
            **self._memory,
        }
        self.timer.received = dict.fromkeys(received, 0)
        self._disk_traffic, self._last_step = disk_traffic, issued.number
        self._collector.put(
            RankStep(
                issued.number,
                time.time(),
                times,
                numbers,
                issued.loss,
                [_later(rate) for rate in issued.rates],
                issued.loss_scale,
                lambda: issued.result.grad_norm,
                lambda: not issued.result.updated,
                self._collector.user,
            )
        )
        # The timeline begins before the first traced step, and ends after the last one.
        is_tracing = issued.number + 1 in self._traced_steps
        if is_tracing != self.timer.tracing:
            self.timer.trace(is_tracing)
            transfers = placement.trace(is_tracing)
            if is_tracing:
                self._name_forwards(units)
            else:
                self._end_trace(transfers)

    def _end_trace(self, transfers: Sequence[TransferTimes]) -> None:
        while self._handles:
            self._handles.pop().remove()
        first = self._traced_steps[0]
        path = "" if self._traces is None else str(self._traces.path / f"trace-{first}.json")
        self._collector.put(TraceRequest(path, first, transfers))

    def _name_forwards(self, units: Sequence[Unit]) -> None:
        """Attribute the forwards of modules to their units, until ``_handles`` are removed."""
        # The engine's own hooks are not on all modules, and a timeline is rare, so these come and go.
        for unit in units:
            spans: list[int] = []

            def begin(*_: Any, name: str = unit.name, spans: list[int] = spans) -> None:
                spans.append(self.timer.begin("forward", name))

            def end(*_: Any, spans: list[int] = spans) -> None:
                if spans:
                    self.timer.end(spans.pop())

            for module in unit.modules:
                self._handles.append(module.register_forward_pre_hook(UncopiedHook(begin)))
                self._handles.append(module.register_forward_hook(UncopiedHook(end), always_call=True))

    def close(self) -> None:
        """Finish the records of the steps so far. Call it on every rank."""
        error = sys.exc_info()[1]
        # The run ends before the last traced step.
        if self.timer.tracing and error is None:
            self._end_trace(())
        self._finalizer.detach()
        self._collector.close(error)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _later(number: Any) -> float | HostCopy:
    """Return a number, which the host reads later if it is a tensor: reading one on a GPU would wait for the device."""
    if isinstance(number, torch.Tensor):
        return HostCopy(number.detach().to(torch.float64, copy=True).view(1))
    return float(number)
