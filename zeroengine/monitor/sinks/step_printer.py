"""Print the rate of training, where the time of a step went, and the bytes of every state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from zeroengine.config.model import Config
from zeroengine.monitor.record import SPLIT, RunEvent, StepRecord
from zeroengine.utils.formats import counted, format_byte_size

# The steps between two prints where steps_per_print is not given.
STEPS_PER_PRINT = 10
BAR_WIDTH = 30
# A smaller share of a step would be printed as 0.0%.
SMALLEST_SHARE = 0.0005


class StepPrinter:
    """Prints every ``steps_per_print`` steps what the configuration asks for; times are means over these steps.

    Args:
        config: The resolved configuration.
        file: Where to print; None for the standard output.
    """

    def __init__(self, config: Config, file: TextIO | None = None) -> None:
        self._config, self._file = config, file
        self._interval = config.steps_per_print or STEPS_PER_PRINT
        self._records: list[StepRecord] = []

    @staticmethod
    def is_asked_for(config: Config) -> bool:
        """Return whether a configuration has one of the three on."""
        return config.wall_clock_breakdown or config.memory_breakdown or config.timers.throughput.enabled

    def step(self, record: StepRecord) -> None:
        """Print what the steps since the last print have taken, if it is time to."""
        self._records.append(record)
        if record.step % self._interval == 0:
            print("\n".join(self._lines()), file=self._file, flush=True)
            self._records.clear()

    def event(self, event: RunEvent) -> None:
        """Print nothing: the engine logs what matters."""

    def close(self) -> None:
        """Print nothing: a rest of less than ``steps_per_print`` steps is left out, as in DeepSpeed."""

    def _lines(self) -> Iterator[str]:
        config, last = self._config, self._records[-1]
        if config.timers.throughput.enabled:
            yield f"step {last.step}: {', '.join(self._rates())}"
        if config.wall_clock_breakdown:
            yield from self._split()
        if config.memory_breakdown:
            yield from _memory(last)

    def _rates(self) -> Iterator[str]:
        records, last = self._records, self._records[-1]
        seconds = sum(record.training_seconds for record in records)
        if last.loss is not None:
            yield f"loss {last.loss:.4f}"
        for name in ("samples", "tokens"):
            amounts = [getattr(record, name) for record in records]
            if None not in amounts and seconds > 0:
                yield f"{sum(amounts) / seconds:,.1f} {name}/s"
        flops = [record.flops for record in records if record.flops is not None]
        if len(flops) == len(records) and seconds > 0:
            yield f"{sum(flops) / seconds / 1e12:.3g} TFLOP/s"
        if last.mfu is not None:
            yield f"MFU {last.mfu:.1%}"
        yield f"{sum(record.seconds for record in records) / len(records):.4g} s per step"

    def _split(self) -> Iterator[str]:
        records, last = self._records, self._records[-1]
        total = sum(record.seconds for record in records) / len(records)
        yield f"step {last.step}: {total * 1000:,.1f} ms per step, mean over {counted(len(records), 'step')}"
        for kind in SPLIT:
            seconds = sum(record.split.get(kind, 0.0) for record in records) / len(records)
            share = seconds / total if total > 0 else 0.0
            # Kinds of work that a run does not have, such as offload, would only distract.
            if share >= SMALLEST_SHARE:
                bar = "#" * round(share * BAR_WIDTH)
                yield f"  {kind:<10}{seconds * 1000:>12,.1f} ms {share:>7.1%}  {bar}".rstrip()
        if last.slowest is not None:
            yield f"  {last.slowest.text}"


def _memory(record: StepRecord) -> Iterator[str]:
    """Yield a table of bytes by state, with a column for each kind of memory that holds any."""
    memory = record.memory
    places = {name: sizes for name in ("device", "cpu", "nvme") if any((sizes := getattr(memory, name)).values())}
    yield f"step {record.step}: memory{''.join(f'{name:>14}' for name in places)}"
    for state in dict.fromkeys(state for sizes in places.values() for state in sizes):
        yield f"  {state:<14}" + "".join(f"{format_byte_size(sizes.get(state, 0)):>14}" for sizes in places.values())
    yield f"  {'peak':<14}{format_byte_size(memory.peak):>14}"
