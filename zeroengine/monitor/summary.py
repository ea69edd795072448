"""Make the record of a step from what each rank measured.

[Note: Which rank the others wait for]
All ranks take the same time for a step, because they wait for one another. A rank that is slow waits less than the
others. So ranks are compared by the time in which they do not wait, and the kind of work in which the slowest rank
differs most from the others is the cause. The least time that any rank waits is explained by no rank: even the slowest
one waits for messages. If that is a large part of the step, the cause is the link. The same holds for transfers to the
disk that all ranks wait for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from zeroengine.monitor.record import (
    KINDS,
    OUTSIDE_TRAINING,
    SPLIT,
    TRAFFIC,
    Cause,
    SlowestRank,
    StepMemory,
    StepRecord,
)

Array = npt.NDArray[np.float64]
STATES = ("parameters", "gradients", "master", "optimizer", "buckets", "gathered", "staging", "checkpoint")
MEDIA = ("device", "cpu", "nvme")
# Kinds of work in the terms in which ranks are compared.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("forward", "backward", "update"),
    "wait": ("gather", "reduce", "exchange"),
    "offload": ("offload",),
    "other": ("other", "checkpoint", "evaluation"),
}
# A rank stands out if it takes longer than the median of the others by this share of the step.
STRAGGLER_SHARE = 0.05
# What all ranks wait for stands out if it takes this share of the step.
COMMON_SHARE = 0.3
# Differences below these seconds are chance.
MIN_SECONDS = 1e-3
CAUSES: Mapping[str, str] = {
    "compute": "computes",
    "offload": "waits for its disk or CPU memory",
    "other": "is busy elsewhere",
}


class RankRow:
    """The layout of the float64 vector that each rank fills in a step, and that rank 0 collects.

    Args:
        units: The names of the units.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self.units = tuple(units)
        memory = (f"{medium}.{state}" for medium in MEDIA for state in STATES)
        waits = (f"{kind}.{number}" for kind in ("gather", "reduce") for number in range(len(self.units)))
        scalars = ("has_loss", "loss", "loss_weight", "samples", "tokens", "flops", "peak")
        self.names = (*SPLIT, *TRAFFIC, *scalars, *memory, *waits)
        self._index = {name: index for index, name in enumerate(self.names)}

    def pack(self, values: Mapping[str, float | None], slots: Sequence[float]) -> Array:
        """Return the vector of a rank.

        Args:
            values: Traffic, scalars and memory by name. Absent and None: unknown.
            slots: The seconds of ``Timer.slot_names``.
        """
        row = np.full(len(self.names), np.nan)
        # The slots after "other" are a table: for each kind the work for no unit, then that for each unit.
        table = np.asarray(slots[1:]).reshape(len(KINDS), 1 + len(self.units))
        row[: len(KINDS)] = table.sum(axis=1)
        row[len(KINDS)] = slots[0]
        for name, value in values.items():
            row[self._index[name]] = np.nan if value is None else value
        first = len(self.names) - 2 * len(self.units)
        row[first:] = np.concatenate([table[KINDS.index(kind), 1:] for kind in ("gather", "reduce")])
        return row

    def columns(self, rows: Array, names: Sequence[str]) -> Array:
        """Return the columns of ``rows``, of shape (ranks, columns), that have these names."""
        return rows[:, [self._index[name] for name in names]]


@dataclass(frozen=True)
class CommonFacts:
    """What rank 0 knows of a step for all ranks. The attributes are those of ``StepRecord``."""

    step: int
    time: float
    lr: Sequence[float]
    grad_norm: float
    loss_scale: float
    skipped: bool
    user: Mapping[str, float]


def summarize(rows: Array, layout: RankRow, facts: CommonFacts, peak_flops: float | None) -> StepRecord:
    """Return the record of a step.

    Args:
        rows: The vector of each rank, in rank order.
        layout: Its layout.
        facts: What is the same on all ranks.
        peak_flops: The peak rate of one rank in FLOP/s, if it is known.
    """
    split = layout.columns(rows, SPLIT)
    seconds = float(split.sum(axis=1).mean())
    ranks = {group: [float(x) for x in layout.columns(rows, names).sum(axis=1)] for group, names in GROUPS.items()}
    traffic = dict(zip(TRAFFIC, layout.columns(rows, TRAFFIC).mean(axis=0).tolist(), strict=True))
    samples, tokens, flops = (_total(layout.columns(rows, [name])) for name in ("samples", "tokens", "flops"))
    training = seconds - float(layout.columns(rows, OUTSIDE_TRAINING).sum(axis=1).mean())
    mfu = None if flops is None or not peak_flops or training <= 0 else flops / training / peak_flops / len(rows)
    units = {
        kind: layout.columns(rows, [f"{kind}.{number}" for number in range(len(layout.units))]).mean(axis=0).tolist()
        for kind in ("gather", "reduce")
    }
    has_loss, losses, weights = layout.columns(rows, ["has_loss", "loss", "loss_weight"]).T
    loss = float((losses * weights).sum() / weights.sum()) if has_loss.all() and weights.sum() else None
    return StepRecord(
        step=facts.step,
        time=facts.time,
        seconds=seconds,
        loss=loss,
        lr=facts.lr,
        grad_norm=facts.grad_norm,
        loss_scale=facts.loss_scale,
        skipped=facts.skipped,
        # A rank counts its share of a sample.
        samples=None if samples is None else round(samples),
        tokens=None if tokens is None else int(tokens),
        flops=flops,
        mfu=mfu,
        split=dict(zip(SPLIT, split.mean(axis=0).tolist(), strict=True)),
        ranks=ranks,
        slowest=find_slowest(ranks, seconds, traffic),
        units=units,
        traffic=traffic,
        memory=_memory(rows, layout),
        user=facts.user,
    )


def find_slowest(
    ranks: Mapping[str, Sequence[float]], seconds: float, traffic: Mapping[str, float]
) -> SlowestRank | None:
    """Return the rank that the others wait for, and why; None if none stands out. See the note above.

    Args:
        ranks: The seconds of each rank by the names in ``GROUPS``.
        seconds: The seconds of the step.
        traffic: Bytes of a rank, by the names in ``TRAFFIC``.
    """
    busy = [sum(times) for times in zip(*(ranks[name] for name in ("compute", "offload", "other")), strict=True)]
    rank = max(range(len(busy)), key=busy.__getitem__)
    straggling = 0.0
    if len(busy) > 1:
        straggling = busy[rank] - _median_of_others(busy, rank)
    # What even the rank that waits least waits for.
    link, disk = min(ranks["wait"]) if len(busy) > 1 else 0.0, min(ranks["offload"])
    if straggling > max(STRAGGLER_SHARE * seconds, max(link, disk) / 2, MIN_SECONDS):
        causes: tuple[Cause, ...] = ("compute", "offload", "other")
        cause = max(causes, key=lambda name: ranks[name][rank] - _median_of_others(ranks[name], rank))
        text = f"rank {rank} {CAUSES[cause]} {straggling:.3f} s longer than the other ranks"
        return SlowestRank(rank, straggling, cause, text)
    if max(link, disk) < max(COMMON_SHARE * seconds, MIN_SECONDS):
        return None
    if disk > link:
        rank = max(range(len(busy)), key=ranks["offload"].__getitem__)
        rate = _rate(traffic, ("disk_read_bytes", "disk_write_bytes"), disk)
        return SlowestRank(rank, disk, "offload", f"every rank waits {disk:.3f} s for its disk or CPU memory{rate}")
    rank = max(range(len(busy)), key=ranks["wait"].__getitem__)
    rate = _rate(traffic, ("gather_bytes", "reduce_bytes", "exchange_bytes"), link)
    return SlowestRank(rank, link, "link", f"every rank waits {link:.3f} s for messages, and no rank is behind{rate}")


def _rate(traffic: Mapping[str, float], names: Sequence[str], seconds: float) -> str:
    nbytes = sum(traffic.get(name, 0.0) for name in names)
    # Without bytes, as where a store is CPU memory, there is no rate.
    return f" ({nbytes / 1e6:.1f} MB, {nbytes / 1e6 / seconds:.0f} MB/s)" if nbytes > 0 and seconds > 0 else ""


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return median(value for other, value in enumerate(values) if other != rank)


def _total(column: Array) -> float | None:
    total = float(column.sum())
    return None if math.isnan(total) else total


def _memory(rows: Array, layout: RankRow) -> StepMemory:
    most = {}
    for medium in MEDIA:
        values = layout.columns(rows, [f"{medium}.{state}" for state in STATES]).max(axis=0)
        # States that a kind of memory never holds are left out.
        most[medium] = {state: int(value) for state, value in zip(STATES, values, strict=True) if value > 0}
    peak = float(layout.columns(rows, ["peak"]).max())
    return StepMemory(**most, peak=0 if math.isnan(peak) else int(peak))
