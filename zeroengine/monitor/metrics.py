"""The numbers of a step by name, as loggers take them.

The names under ``Train/Samples`` and the count of samples that they are drawn over are DeepSpeed's
(``deepspeed/runtime/engine.py`` 0.19.8), so that its dashboards show these runs as well. ``docs/monitoring.md`` lists
all names.
"""

from __future__ import annotations

from collections.abc import Iterator

from zeroengine.config.model import Config
from zeroengine.monitor.record import StepRecord

MILLISECONDS = 1000.0


class Metrics:
    """Turns the records of a run into numbers by name.

    Args:
        config: The resolved configuration. It says which of DeepSpeed's metrics exist.
    """

    def __init__(self, config: Config) -> None:
        self._scales_loss = config.scales_loss
        # DeepSpeed writes these times under the same condition.
        self._has_times = config.wall_clock_breakdown or config.flops_profiler.enabled
        self._num_samples = 0
        self._last_step: int | None = None

    def position(self, record: StepRecord) -> int:
        """Return the number of samples up to the end of this step, or of steps where samples are not counted.

        A run that resumes, or goes back to an earlier checkpoint, is taken to have had as many samples in each step
        before. Call it once for each record, in order.
        """
        if record.samples is None:
            return record.step
        num_steps = record.step - (self._last_step or 0)
        self._num_samples += num_steps * record.samples
        self._last_step = record.step
        return self._num_samples

    def values(self, record: StepRecord) -> dict[str, float]:
        """Return the numbers of a step by name. Numbers that are not known are left out."""
        named = {**dict(self._deepspeed_values(record)), **dict(_own_values(record)), **record.user}
        return {name: float(value) for name, value in named.items() if value is not None}

    def _deepspeed_values(self, record: StepRecord) -> Iterator[tuple[str, float | None]]:
        prefix, split = "Train/Samples", record.split
        yield f"{prefix}/train_loss", record.loss
        yield f"{prefix}/lr", next(iter(record.lr), None)
        if self._scales_loss:
            yield f"{prefix}/loss_scale", record.loss_scale
        if self._has_times and split:
            reduce = split["reduce"]
            times = {
                "forward": split["forward"],
                "backward": split["backward"] + reduce,
                "backward_inner": split["backward"],
                "backward_allreduce": reduce,
                "step": split["update"] + split["offload"],
            }
            for name, seconds in times.items():
                yield f"{prefix}/elapsed_time_ms_{name}", seconds * MILLISECONDS


def _own_values(record: StepRecord) -> Iterator[tuple[str, float | None]]:
    """Yield the metrics that DeepSpeed does not have."""
    yield "zeroengine/step", record.step
    yield "zeroengine/seconds", record.seconds
    yield "zeroengine/grad_norm", record.grad_norm
    yield "zeroengine/skipped", record.skipped
    yield "zeroengine/mfu", record.mfu
    # A clock that was set back may give a step no time at all.
    seconds_of_training = record.training_seconds
    if seconds_of_training > 0:
        for name in ("samples", "tokens", "flops"):
            amount = getattr(record, name)
            if amount is not None:
                yield f"zeroengine/{name}_per_second", amount / seconds_of_training
    for number, rate in enumerate(record.lr):
        if number:
            yield f"zeroengine/lr/group{number}", rate
    for kind, seconds in record.split.items():
        yield f"zeroengine/split/{kind}", seconds
    if record.slowest is not None:
        yield "zeroengine/slowest/rank", record.slowest.rank
        yield "zeroengine/slowest/seconds", record.slowest.seconds
    for name, nbytes in record.traffic.items():
        yield f"zeroengine/traffic/{name}", nbytes
    for place in ("device", "cpu", "nvme"):
        for state, held in getattr(record.memory, place).items():
            yield f"zeroengine/memory/{place}/{state}", held
    yield "zeroengine/memory/peak", record.memory.peak
