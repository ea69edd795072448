"""Count and time the collectives of one rank, by operation and unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from zeroengine.config.sinks import CommsLogger
from zeroengine.utils.formats import aligned, format_byte_size

# The bytes of a buffer that pass each rank's link, before the factor (n - 1) / n of n ranks: see "Bandwidth" in
# github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
BUS_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
MILLISECONDS = 1000.0


@dataclass
class OperationTotals:
    """What the collectives of one operation and unit add up to.

    Attributes:
        count: Their number.
        nbytes: The bytes of their whole buffers, which hold the parts of all ranks.
        seconds: The time that they were under way.
        exposed_seconds: The part of it in which this rank launched them or waited for them.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0

    def add(self, other: OperationTotals) -> None:
        """Add what others add up to."""
        self.count += other.count
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.exposed_seconds += other.exposed_seconds


class CommsLog:
    """The collectives of this rank so far.

    Args:
        section: What to log.
        world_size: The number of ranks.
        what: What the collectives are of, for the title of the table; empty: all that the engine moves.

    Attributes:
        totals: By operation and unit, in the order of their first use.
    """

    def __init__(self, section: CommsLogger, world_size: int, what: str = "") -> None:
        self._section, self._world_size, self._what = section, world_size, what
        self.totals: defaultdict[tuple[str, str], OperationTotals] = defaultdict(OperationTotals)

    def add(self, operation: str, unit: str, collective: OperationTotals) -> None:
        """Add a collective that has ended."""
        self.totals[operation, unit].add(collective)
        if self._section.verbose:
            print(" ".join(self._row(operation, unit, collective)), flush=True)

    def table(self) -> str:
        """Return a table of all collectives: a row for each unit, below that of the operation's sum."""
        by_operation: defaultdict[str, OperationTotals] = defaultdict(OperationTotals)
        for (operation, _), totals in self.totals.items():
            by_operation[operation].add(totals)
        heads = ("operation", "unit", "count", "size", "total", "time", "exposed", "GB/s", "bus GB/s")
        rows: list[tuple[str, ...]] = [heads]
        for operation, operation_sum in by_operation.items():
            rows.append(tuple(self._row(operation, "all units", operation_sum)))
            rows += [
                tuple(self._row(operation, unit, totals))
                for (other, unit), totals in self.totals.items()
                if other == operation
            ]
        of_what = self._what and f", of {self._what}"
        lines = [f"collectives of rank 0 of {self._world_size}{of_what}:", *aligned(rows)]
        total = OperationTotals()
        for operation_sum in by_operation.values():
            total.add(operation_sum)
        lines.append(
            f"  in total {total.count} collectives of {format_byte_size(total.nbytes)}; this rank spent "
            f"{total.exposed_seconds:.3f} s launching them and waiting for them"
        )
        return "\n".join(lines)

    def _row(self, operation: str, unit: str, totals: OperationTotals) -> Iterator[str]:
        yield operation
        yield unit
        yield str(totals.count)
        yield format_byte_size(totals.nbytes / max(totals.count, 1))
        yield format_byte_size(totals.nbytes)
        yield f"{totals.seconds * MILLISECONDS:.2f} ms"
        yield f"{totals.exposed_seconds * MILLISECONDS:.2f} ms"
        # A clock may be too coarse for a collective of one rank, which moves nothing.
        rate = totals.nbytes / totals.seconds / 1e9 if totals.seconds > 0 else 0.0
        yield f"{rate:.3g}"
        yield f"{rate * BUS_PASSES[operation] * (self._world_size - 1) / self._world_size:.3g}"
