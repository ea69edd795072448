"""Updates of many segments of many buffers, whose scalars (norm, counts, rates) stay on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library
from zeroengine.ops._cuda_library import FACTOR_FIELDS, GROUP_FIELDS, RUN_BYTES, CudaBuffer, CudaSegment
from zeroengine.ops._library import MOMENT_BLOCK
from zeroengine.ops.update import update_step
from zeroengine.ops.update_arrays import RULES, UpdateArrays

_RULE_NAMES = {rule.code: name for name, rule in RULES.items()}


@dataclass(frozen=True)
class UpdateSegment:
    """Neighboring elements of a buffer that share hyperparameters and a step count.

    Attributes:
        start: The first element within the buffer. With moments in uint8, it begins a block.
        stop: The end of the segment within the buffer.
        group: The row of the table's ``groups``.
        slot: The place of the table's ``steps``.
    """

    start: int
    stop: int
    group: int
    slot: int


@dataclass(frozen=True)
class SegmentList:
    """The segments of one flat buffer, and what its stochastic rounding depends on.

    Attributes:
        segments: Ascending. The elements between them are never updated.
        seed: The seed of stochastic rounding at step count s is ``seed + s``.
        offset: The index of the buffer's element 0 among those that share the seed.
    """

    segments: Sequence[UpdateSegment]
    seed: int = 0
    offset: int = 0


class UpdateTable:
    """Updates a fixed set of buffers by the fused rules.

    [Note: An update with its scalars on the device]
    On CUDA everything that a step depends on stays on the device. ``prepare`` counts the step and computes every
    segment's factors in one small launch. Then one launch updates a buffer, whatever its number of segments, and one
    call of the library launches those of any number of buffers. So the host runs ahead, and a CUDA graph may capture
    ``prepare`` and ``update`` together: a replay reads ``groups``, ``steps`` and the factor anew. On overflow nothing
    is written, and no step is counted. Segments of one buffer may have different rules.

    On the CPU, and where the CUDA library is missing, `update_step` does the same for each segment.

    Args:
        buffers: The segments of each buffer.
        num_groups: The number of rows of ``groups``.
        num_slots: The number of step counts.
        device: The device of the buffers, with its index.

    Attributes:
        groups: float64, a row for each group, of ``GROUP_FIELDS``. Written by ``set_groups``, or by the caller in
            stream order.
        steps: int64, a step count for each slot.
    """

    def __init__(self, buffers: Sequence[SegmentList], num_groups: int, num_slots: int, device: torch.device) -> None:
        self.device, self._cuda = device, _cuda_library.cuda_library(device)
        self._segment_lists = tuple(buffers)
        # Of each buffer, whether moments in blocks fit it.
        self._begin_blocks = [
            all(start % MOMENT_BLOCK == 0 for start in (buffer.offset, *(s.start for s in buffer.segments)))
            for buffer in buffers
        ]
        for segment_list in self._segment_lists:
            _check(segment_list, num_groups, num_slots)
        self.groups = torch.zeros(num_groups, len(GROUP_FIELDS), dtype=torch.float64, device=self.device)
        self.steps = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        # Of each buffer, its arrays and whether values written from outside are reloaded.
        self._arrays: list[tuple[UpdateArrays, bool] | None] = [None] * len(buffers)
        # The rows that ``set_groups`` wrote last.
        self._written: list[list[float]] = []
        if self._cuda is not None:
            self._lay_out(self._cuda)

    def _lay_out(self, cuda: ctypes.CDLL) -> None:
        rows, first_run, num_tiles = [], [0], []
        # A tile is the range that a block of threads updates at one time. Tiles are numbered through a buffer's
        # segments, so that one launch covers them all, whatever their sizes.
        for segment_list in self._segment_lists:
            seed, offset, tiles = segment_list.seed, segment_list.offset, 0
            for s in segment_list.segments:
                rows.append(CudaSegment(s.start, s.stop, tiles, seed, offset, s.group, s.slot))
                tiles += cuda.ze_cuda_tiles(s.start, s.stop)
            first_run.append(len(rows))
            num_tiles.append(tiles)
        # frombuffer refuses an empty buffer, and takes a writable one without a warning.
        raw = bytearray((CudaSegment * len(rows))(*rows)) or bytearray(1)
        self._segments = torch.frombuffer(raw, dtype=torch.uint8).to(self.device)
        # ``prepare`` writes a run for each segment here, and ``update`` reads it. Only the library knows its fields.
        self._runs = torch.zeros(max(1, len(rows)) * RUN_BYTES, dtype=torch.uint8, device=self.device)
        self._num_runs = len(rows)
        # The array holds the runs of one buffer after those of another.
        self._buffers = (CudaBuffer * len(num_tiles))()
        for buffer, tiles, (first, last) in zip(self._buffers, num_tiles, pairwise(first_run), strict=True):
            buffer.runs, buffer.num_runs = self._runs.data_ptr() + first * RUN_BYTES, last - first
            buffer.num_tiles = tiles

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the rules and their hyperparameters without waiting for the device.

        Args:
            groups: For each group ``rule`` and ``lr``, and other keyword arguments of `update_step` that do not vary by
                step. A learning rate may be a tensor on the device.
        """
        assert len(groups) == len(self.groups)
        # A captured schedule writes the rate on the device. Reading it here would make the host wait.
        rates = {i: g["lr"] for i, g in enumerate(groups) if isinstance(g["lr"], Tensor) and not g["lr"].is_cpu}
        rows = [_row(group, 0.0 if i in rates else float(group["lr"])) for i, group in enumerate(groups)]
        # Hyperparameters seldom change, and writing them costs a launch.
        if rows != self._written:
            values = torch.tensor(rows, dtype=torch.float64, device="cpu")
            if self._cuda is None:
                self.groups.copy_(values.view_as(self.groups))
            else:
                # The library passes the values as arguments of a kernel. A copy from ordinary host memory would make
                # the host wait.
                _cuda_library.call(
                    self._cuda, "ze_cuda_write", self.device, self.groups.data_ptr(), values.data_ptr(), values.nbytes
                )
            self._written = rows
        for i, rate in rates.items():
            # The device may have changed the rate since the last step, so it is copied each time.
            self.groups[i, 0].copy_(rate.view(()))

    def prepare(self, factor: Tensor, used: Tensor | None = None) -> None:
        """Count a step. The next ``update`` of each buffer takes it.

        Args:
            factor: The result of `gradient_factor`.
            used: float64, a value for each slot. A slot with 0 counts no step, and its segments change nothing but
                their moving average. None: every slot is used.
        """
        for x, numel in ((factor, len(FACTOR_FIELDS)), (used, len(self.steps))):
            if x is not None:
                assert (x.dtype, x.shape, x.device) == (torch.float64, (numel,), self.device) and x.is_contiguous()
        if self._cuda is None:
            self._prepare_on_host(factor, used)
            return
        _cuda_library.call(
            self._cuda,
            "ze_cuda_update_prepare",
            self.device,
            self._segments.data_ptr(),
            self._num_runs,
            self.groups.data_ptr(),
            self.steps.data_ptr(),
            None if used is None else used.data_ptr(),
            len(self.steps),
            factor.data_ptr(),
            self._runs.data_ptr(),
        )

    def _prepare_on_host(self, factor: Tensor, used: Tensor | None) -> None:
        # This waits if the table is on a GPU without the CUDA library.
        grad_scale, _, overflow = factor.tolist()
        active = torch.ones_like(self.steps) if used is None else (used > 0).long()
        # As on the device, an overflow counts no step, and `update` writes nothing.
        if overflow:
            active.zero_()
        self.steps += active
        self._host = HostStep(self.groups.tolist(), self.steps.tolist(), active.tolist(), grad_scale, overflow > 0)

    def set_arrays(self, buffer: int, arrays: UpdateArrays, reload_written: bool = False) -> None:
        """Set the arrays of one buffer, before its first ``update`` and when they have got other memory.

        Args:
            buffer: The buffer's index.
            arrays: Its arrays. Rules that take fewer moments leave the others alone.
            reload_written: As in `update_step`.
        """
        arrays.check()
        segments = self._segment_lists[buffer].segments
        assert not segments or segments[-1].stop <= arrays.param.numel(), (segments[-1], arrays.param.numel())
        if arrays.scales:
            assert self._begin_blocks[buffer], "with moments in uint8, segments and offsets begin blocks"
        self._arrays[buffer] = arrays, reload_written
        if self._cuda is not None:
            self._buffers[buffer].arrays = arrays.pointers(reload_written)

    def update(self, first: int, stop: int) -> None:
        """Take the prepared step for the buffers ``first`` to ``stop``. Nothing is written between their segments."""
        assert None not in self._arrays[first:stop], "set_arrays comes before"
        if self._cuda is not None:
            buffers = ctypes.byref(self._buffers, first * ctypes.sizeof(CudaBuffer))
            _cuda_library.call(self._cuda, "ze_cuda_update_buffers", self.device, buffers, stop - first)
            return
        for buffer in range(first, stop):
            self._update_on_host(buffer)

    def _update_on_host(self, buffer: int) -> None:
        host, segment_list, known = self._host, self._segment_lists[buffer], self._arrays[buffer]
        assert known is not None
        arrays, reload_written = known
        for s in segment_list.segments:
            settings: dict[str, Any] = dict(zip(GROUP_FIELDS, host.groups[s.group], strict=True))
            rule, step = _RULE_NAMES[int(settings.pop("rule"))], host.steps[s.slot]
            settings |= {name: bool(settings[name]) for name in ("maximize", "nesterov")}
            if not host.active[s.slot]:
                if host.overflow or arrays.average is None:
                    continue
                # The average is rounded by new bits as long as any step is counted.
                rule, step = "average_only", max(host.steps)
            update_step(
                rule,
                arrays.part(s.start, s.stop).of_rule(rule),
                **settings,
                grad_scale=host.grad_scale,
                reload_written=reload_written,
                step=max(step, 1),
                seed=segment_list.seed + step,
                offset=segment_list.offset + s.start,
            )


class HostStep(NamedTuple):
    """What ``UpdateTable.prepare`` computes where the update runs on the host.

    Attributes:
        groups, steps: The values of the table's tensors.
        active: For each slot, whether its step is counted.
        grad_scale: Multiplies the gradient.
        overflow: Whether nothing is updated.
    """

    groups: list[list[float]]
    steps: list[int]
    active: list[int]
    grad_scale: float
    overflow: bool


def _row(group: Mapping[str, Any], lr: float) -> list[float]:
    values = {**group, "lr": lr, "rule": RULES[group["rule"]].code}
    assert values.keys() <= {*GROUP_FIELDS}, values
    # The rule and the flags are doubles like the rates, so that a row is one array.
    return [float(values.get(name, 0.0)) for name in GROUP_FIELDS]


def _check(segment_list: SegmentList, num_groups: int, num_slots: int) -> None:
    last = 0
    for s in segment_list.segments:
        # Overlapping segments would be updated twice, by several blocks at once on a GPU.
        assert last <= s.start <= s.stop and 0 <= s.group < num_groups and 0 <= s.slot < num_slots, s
        last = s.stop
    assert 0 <= segment_list.seed < 1 << 62 and 0 <= segment_list.offset < 1 << 62
