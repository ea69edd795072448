"""Tell what ranks launch in a micro-step, through the process group's store, to a rank that cannot run its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from zeroengine.errors import DivergenceError
from zeroengine.schedule.actions import Gather, Reduce

Launch = Gather | Reduce
# About so many ranks of a large group tell their launches: a store serves one request after another.
NUM_TELLERS = 64
POLL_INTERVAL_S = 0.005


class LaunchBoard:
    """What each rank launches in a micro-step, by one number for all ranks.

    A rank tells a launch before it launches, as it may then wait for the others. Setting a key of the store takes a few
    microseconds, as nothing comes back. The keys, for rank r:

    - ``r/i``: the number of the micro-step, and launch i;
    - ``r/end``: the number of the micro-step whose launches have ended, or that failed, on this rank; and why no rank
      can take it again, if the rank knows.

    Args:
        store: A client of the process group's store that nobody else uses.
        rank: This rank.
        world_size: The number of ranks.
        timeout_s: Seconds after which a rank that launches nothing has stalled.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        # Those of different hosts have different numbers there, as memory is short on the first GPUs more often.
        stride = max(world_size // NUM_TELLERS, 1)
        self._is_teller = rank % stride == rank // stride % stride
        self._number = self._num_told = 0

    def begin(self, number: int) -> None:
        """Begin the micro-step ``number``. Every rank has ended the one before."""
        self._number, self._num_told = number, 0

    def tell(self, launch: Launch) -> None:
        """Tell the others what this rank launches next."""
        if self._is_teller:
            self._set(launch)

    def end(self, obstacle: str = "") -> None:
        """Tell the others that this rank launches nothing more by itself, and why none can take the step again."""
        self._store.set(f"{self._rank}/end", f"{self._number} {obstacle}")

    def follow(self, launched: Sequence[Launch]) -> Iterator[Launch]:
        """Yield what other ranks launch after ``launched``, as they do so, until no rank launches anything by itself.

        Raises:
            DivergenceError: A rank neither launches anything nor ends, or knows why no rank can take the step again.
        """
        if not self._is_teller:
            for launch in launched:
                self._set(launch)
        self.end()
        index, ranks = len(launched), list(range(self._world_size))
        deadline = time.monotonic() + self._timeout_s
        while True:
            # What was told before the end is read after it.
            ends = {rank: (self._get(f"{rank}/end") or "-1 ").partition(" ") for rank in ranks}
            running = [rank for rank, (number, _, _) in ends.items() if int(number) != self._number]
            obstacle = next((text for rank, (_, _, text) in ends.items() if text and rank not in running), None)
            if obstacle is not None:
                raise DivergenceError(obstacle)
            # This rank may have told what it could not launch. The others then launch it.
            launches = ((rank, self._launch(rank, index)) for rank in ranks)
            teller, next_launch = next((pair for pair in launches if pair[1] is not None), (-1, None))
            if next_launch is not None:
                yield next_launch
                # The next one is probably told by the same rank.
                ranks.remove(teller)
                ranks.insert(0, teller)
                index, deadline = index + 1, time.monotonic() + self._timeout_s
            elif not running:
                return
            elif time.monotonic() > deadline:
                raise DivergenceError(f"rank {running[0]} has launched no collective for {self._timeout_s:g} s")
            else:
                time.sleep(POLL_INTERVAL_S)

    def _set(self, launch: Launch) -> None:
        kind, exact = ("gather", launch.exact) if isinstance(launch, Gather) else ("reduce", False)
        self._store.set(f"{self._rank}/{self._num_told}", f"{self._number} {kind} {launch.unit} {int(exact)}")
        self._num_told += 1

    def _launch(self, rank: int, index: int) -> Launch | None:
        """Return launch ``index`` of a rank in this micro-step, if it has been told."""
        number, kind, unit, exact = (self._get(f"{rank}/{index}") or "-1 - 0 0").split()
        if int(number) != self._number:
            return None
        return Gather(int(unit), bool(int(exact))) if kind == "gather" else Reduce(int(unit))

    def _get(self, key: str) -> str | None:
        # ``get`` would wait for the key.
        return self._store.get(key).decode() if self._store.check([key]) else None
