"""Adam steps of many segments of many buffers, whose scalars (norm, counts, rates) stay on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library
from zeroengine.ops._cuda_library import FACTOR_FIELDS, GROUP_FIELDS, RUN_BYTES, CudaSegment
from zeroengine.ops.update import UpdateArrays, update_step


@dataclass(frozen=True)
class UpdateSegment:
    """Neighboring elements of a buffer that share hyperparameters and a step count.

    Attributes:
        start: The first element within the buffer.
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
    """Updates a fixed set of buffers by Adam.

    [Note: Adam with its scalars on the device]
    On CUDA everything that a step depends on stays on the device. ``prepare`` counts the step and computes every
    segment's factors in one small launch. Then one launch updates a buffer, whatever its number of segments. So the
    host runs ahead, and a CUDA graph may capture ``prepare`` and ``update`` together: a replay reads ``groups``,
    ``steps`` and the factor anew. On overflow nothing is written, and no step is counted.

    On the CPU, and where the CUDA library is missing, `update_step` does the same for each segment.

    Args:
        buffers: The segments of each buffer.
        num_groups: The number of rows of ``groups``.
        num_slots: The number of step counts.
        device: The device of the buffers, with its index.

    Attributes:
        groups: float64, a row for each group: lr, beta1, beta2, eps, weight_decay, decoupled, maximize. Written by
            ``set_groups``, or by the caller in stream order.
        steps: int64, a step count for each slot.
    """

    def __init__(self, buffers: Sequence[SegmentList], num_groups: int, num_slots: int, device: torch.device) -> None:
        self.device, self._cuda = device, _cuda_library.cuda_library(device)
        self._segment_lists = tuple(buffers)
        for segment_list in self._segment_lists:
            _check(segment_list, num_groups, num_slots)
        self.groups = torch.zeros(num_groups, len(GROUP_FIELDS), dtype=torch.float64, device=self.device)
        self.steps = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        # The rows that ``set_groups`` wrote last.
        self._written: list[list[float]] = []
        if self._cuda is not None:
            self._lay_out(self._cuda)

    def _lay_out(self, cuda: ctypes.CDLL) -> None:
        rows = []
        # A tile is the range that a block of threads updates at one time. Tiles are numbered through a buffer's
        # segments, so that one launch covers them all, whatever their sizes.
        self._first_run, self._num_tiles = [0], []
        for segment_list in self._segment_lists:
            seed, offset, tiles = segment_list.seed, segment_list.offset, 0
            for s in segment_list.segments:
                rows.append(CudaSegment(s.start, s.stop, tiles, seed, offset, s.group, s.slot))
                tiles += cuda.ze_cuda_tiles(s.start, s.stop)
            self._first_run.append(len(rows))
            self._num_tiles.append(tiles)
        # frombuffer refuses an empty buffer, and takes a writable one without a warning.
        raw = bytearray((CudaSegment * len(rows))(*rows)) or bytearray(1)
        self._segments = torch.frombuffer(raw, dtype=torch.uint8).to(self.device)
        # ``prepare`` writes a run for each segment here, and ``update`` reads it. Only the library knows its fields.
        self._runs = torch.zeros(max(1, len(rows)) * RUN_BYTES, dtype=torch.uint8, device=self.device)

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyperparameters, as in torch's ``param_groups``, without waiting for the device.

        Args:
            groups: With torch's keys, and ``decoupled``. A learning rate may be a tensor on the device.
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
            used: float64, a value for each slot. A slot with 0 counts no step and updates nothing. None: every slot
                is used.
        """
        for x, numel in ((factor, len(FACTOR_FIELDS)), (used, len(self.steps))):
            if x is not None:
                assert (x.dtype, x.shape, x.device) == (torch.float64, (numel,), self.device) and x.is_contiguous()
        if self._cuda is None:
            self._prepare_on_host(factor, used)
            return
        _cuda_library.call(
            self._cuda,
            "ze_cuda_adam_prepare",
            self.device,
            self._segments.data_ptr(),
            self._first_run[-1],
            self.groups.data_ptr(),
            self.steps.data_ptr(),
            None if used is None else used.data_ptr(),
            len(self.steps),
            factor.data_ptr(),
            self._runs.data_ptr(),
        )

    def _prepare_on_host(self, factor: Tensor, used: Tensor | None) -> None:
        # This waits if the table is on a GPU without the CUDA library.
        self._factor, _, overflow = factor.tolist()
        active = torch.ones_like(self.steps) if used is None else (used > 0).long()
        # As on the device, an overflow counts no step, and `update` writes nothing.
        if overflow:
            active.zero_()
        self.steps += active
        self._host = (self.groups.tolist(), self.steps.tolist(), active.tolist())

    def update(
        self,
        buffer: int,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        low_precision_param: Tensor | None = None,
        reload_written: bool = False,
    ) -> None:
        """Take the prepared step for one buffer. Nothing is written between its segments.

        Args:
            buffer: The buffer's index.
            param, grad, exp_avg, exp_avg_sq, low_precision_param, reload_written: As in `update_step`.
        """
        arrays = UpdateArrays(param, grad, exp_avg, exp_avg_sq, low_precision_param)
        arrays.check()
        segments = self._segment_lists[buffer].segments
        assert not segments or segments[-1].stop <= param.numel(), (segments[-1], param.numel())
        if self._cuda is None:
            self._update_on_host(self._segment_lists[buffer], arrays, reload_written)
            return
        # The array holds the runs of one buffer after those of another.
        first, last = self._first_run[buffer : buffer + 2]
        _cuda_library.call(
            self._cuda,
            "ze_cuda_adam_runs",
            self.device,
            *arrays.pointers(),
            reload_written,
            self._runs.data_ptr() + first * RUN_BYTES,
            last - first,
            self._num_tiles[buffer],
        )

    def _update_on_host(self, segment_list: SegmentList, arrays: UpdateArrays, reload_written: bool) -> None:
        groups, steps, active = self._host
        for s in segment_list.segments:
            # Without a gradient on any rank, or on overflow, the segment keeps its values and its step count.
            if not active[s.slot]:
                continue
            group: dict[str, Any] = dict(zip(GROUP_FIELDS, groups[s.group], strict=True))
            group |= {name: bool(group[name]) for name in ("decoupled", "maximize")}
            *required, low_precision_param = (None if x is None else x[s.start : s.stop] for x in arrays)
            update_step(
                *required,  # type: ignore[arg-type]
                **group,
                low_precision_param=low_precision_param,
                grad_scale=self._factor,
                reload_written=reload_written,
                step=steps[s.slot],
                seed=segment_list.seed + steps[s.slot],
                offset=segment_list.offset + s.start,
            )


def _row(group: Mapping[str, Any], lr: float) -> list[float]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    # Flags are doubles like the rates, so that a row is one array.
    flags = [float(bool(group.get(name, False))) for name in ("decoupled", "maximize")]
    return [lr, beta1, beta2, float(group["eps"]), float(group["weight_decay"]), *flags]


def _check(segment_list: SegmentList, num_groups: int, num_slots: int) -> None:
    last = 0
    for s in segment_list.segments:
        # Overlapping segments would be updated twice, by several blocks at once on a GPU.
        assert last <= s.start <= s.stop and 0 <= s.group < num_groups and 0 <= s.slot < num_slots, s
        last = s.stop
    assert 0 <= segment_list.seed < 1 << 62 and 0 <= segment_list.offset < 1 << 62
