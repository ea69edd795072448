"""Which collectives each rank launches, in order. Compares this between ranks, and between two versions of the sources.

    python -m tests.distributed.collective_log --out before.json --transport nccl
    python -m tests.distributed.collective_log --compare before.json after.json

Losses show a wrong order late or never: a rank that launches the operations of a channel at another time than its peers
computes the same, and stalls only where one of them waits for the other.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import experts, test_different_losses
from tests.distributed.models import config
from tests.distributed.random_models.features import random_recipe
from tests.distributed.random_models.training import train_by_engine
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_experts import LAYERS, SINGLE, STYLES, TRANSPORTS, Style
from tests.distributed.training import start
from zeroengine.comm import watchdog
from zeroengine.comm.transports.choose import open_nccl, open_transport
from zeroengine.errors import DivergenceError
from zeroengine.runtime.unit import Unit

CHANNELS = ("gather", "reduce")
OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
MIXTURES = {"layers": (LAYERS, Style()), "experts": (SINGLE, Style())} | STYLES
# The first of these sums whole gradients into shards, and gathers in the step alone.
STAGES = (2, 3)
KINDS = ("styles", "losses", "graphs")
PREFETCH = {"off": (0,), "on": (10**6,), "both": (0, 10**6)}
CONTEXT = 3  # entries before and after a difference


@dataclass
class RankLog:
    """What one rank launched and computed.

    Attributes:
        launches: The channel and the label of each collective, such as "gather layers.0", in order.
        memory: When units are gathered, ahead or not, and released, such as "release layers.0", in order.
        losses: What it computed.
        error: The traceback of what ended the training, in which case there are no losses; empty: nothing.
    """

    launches: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""

    def of_channel(self, channel: str) -> list[str]:
        return [launch for launch in self.launches if launch.startswith(channel)]

    @property
    def end(self) -> str:
        """How the training ended: the message of what it failed with, if it did."""
        return f"failed: {self.error.splitlines()[-1]}" if self.error else "ended well"


Logs = dict[str, list[RankLog]]  # by scenario, each rank's


# -- recording -----------------------------------------------------------------------------------------------------


class Recorded:
    """A transport, or a channel of one, whose launches are recorded.

    Only the engine's: a channel may launch further operations of itself.
    """

    def __init__(self, inner: Any, log: RankLog, channel: str = "") -> None:
        self._inner, self._log, self._channel = inner, log, channel

    def open_groups(self, *args: Any) -> Recorded:
        return Recorded(self._inner.open_groups(*args), self._log)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if self._channel:
            return partial(self._launch, attribute) if name in OPERATIONS else attribute
        return Recorded(attribute, self._log, name) if name in CHANNELS else attribute

    def _launch(self, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        label = next(value for value in (*args, *options.values()) if isinstance(value, str))
        # Before the operation, so that the log has one that fails.
        self._log.launches.append(f"{self._channel} {label}")
        return operation(*args, **options)


@contextlib.contextmanager
def recording(log: RankLog) -> Iterator[None]:
    """Record what this rank launches through transports that open meanwhile."""

    def noted(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(unit: Unit, *args: Any, **options: Any) -> Any:
            log.memory.append(f"{what} {unit.name}")
            return method(unit, *args, **options)

        return run

    def open_recorded(opener: Callable[..., Any], *args: Any) -> Recorded:
        return Recorded(opener(*args), log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroengine.engine.initialize.open_transport", partial(open_recorded, open_transport))
        patch.setattr("tests.nccl_over_gloo.open_nccl", partial(open_recorded, open_nccl))
        for what, method in (("gather", "start_gather"), ("use", "finish_gather"), ("release", "mark_released")):
            patch.setattr(Unit, method, noted(what, getattr(Unit, method)))
        yield


@dataclass(frozen=True)
class Scenario:
    """A training. ``name`` is a style of experts, a kind of loop and a seed, or the seed of a random model."""

    kind: str
    name: str
    stage: int
    prefetch: int
    transport: str
    steps: int = 8

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}, stage {self.stage}, prefetch {'on' if self.prefetch else 'off'}"

    def train(self, folder: str) -> list[float]:
        """Return the losses of this rank. ``folder`` is for what is offloaded to disk, the same one on all ranks."""
        zero = {"prefetch_bucket_size": self.prefetch}
        if self.kind == "styles":
            units, style = MIXTURES[self.name]
            settings = config(self.stage, units=units, zero_optimization=zero)
            return experts.train(self.transport, settings, style, self.steps)
        if self.kind == "losses":
            kind, _, seed = self.name.rpartition(" ")
            options = test_different_losses.KINDS[kind] | {"prefetches": bool(self.prefetch)}
            loop = test_different_losses.Loop(int(seed), **options)
            return test_different_losses.train(self.transport, self.stage, loop, self.steps)
        recipe = random_recipe(int(self.name))
        transport = recipe.transport if self.transport == "nccl" else self.transport
        more = tuple((dict(recipe.zero) | zero).items())
        recipe = dataclasses.replace(recipe, ranks=dist.get_world_size(), transport=transport, zero=more)
        with experts.on_transport(self.transport):
            trace = train_by_engine(recipe, self.stage, folder)
        return trace.values + trace.norms


def scenarios_of(kind: str, transport: str, prefetch: str = "both", num_graphs: int = 80) -> list[Scenario]:
    """All scenarios of a kind."""
    # Prefetching is an axis of its own here.
    loops = [loop for loop in test_different_losses.KINDS if loop != "prefetches"]
    names = {
        "styles": list(MIXTURES),
        "losses": [f"{loop} {seed}" for loop in loops for seed in range(4)],
        "graphs": [str(seed) for seed in range(num_graphs)],
    }
    axes = itertools.product(names[kind], STAGES, PREFETCH[prefetch])
    return [Scenario(kind, *axis, transport) for axis in axes]


def record_on_rank(scenarios: Sequence[Scenario], folder: str = "") -> list[RankLog]:
    """Each scenario's log, up to the first that fails: it leaves its engine in any state. Also leave them in a folder.

    A rank of NCCL's transport that stalls is ended by its watchdog, and returns nothing.
    """
    rank, end_process = start(), watchdog._end_process
    logging.getLogger("zeroengine").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # torch's, of checkpoints and hooks that a recipe combines
    logs: list[RankLog] = []

    def leave(error: str) -> None:
        logs[-1].error = error
        if folder:
            Path(folder, str(rank)).write_text(json.dumps(logs, default=dataclasses.asdict))

    def leave_and_end(error: DivergenceError) -> None:
        leave(str(error))
        end_process(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_end_process", leave_and_end)
        while len(logs) < len(scenarios) and not (logs and logs[-1].error):
            logs.append(log := RankLog())
            with recording(log):
                try:
                    log.losses = scenarios[len(logs) - 1].train(folder)
                except BaseException as error:
                    log.error = "".join(traceback.format_exception(error, limit=-5))
    leave(logs[-1].error)
    return logs


def record(scenarios: Sequence[Scenario], num_ranks: int) -> Logs:
    """Each scenario's logs. Start ranks once, and again after each scenario that fails."""
    found: Logs = {}
    while len(found) < len(scenarios):
        remaining = scenarios[len(found) :]
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, str(rank)) for rank in range(num_ranks)]
            try:
                run_ranks(num_ranks, record_on_rank, remaining, folder, timeout=120.0 + 20 * len(remaining))
            except RankFailed:
                if not all(path.exists() for path in paths):
                    raise
            by_rank = [[RankLog(**log) for log in json.loads(path.read_text())] for path in paths]
        found |= {str(scenario): list(logs) for scenario, *logs in zip(remaining, *by_rank, strict=False)}
    return found


# -- comparing -----------------------------------------------------------------------------------------------------


def first_difference(first: Sequence[str], second: Sequence[str]) -> str:
    """Where two logs differ first, with what surrounds it; empty: nowhere."""
    pairs = itertools.zip_longest(first, second)
    index = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if index is None:
        return ""
    begin, end = max(0, index - CONTEXT), index + CONTEXT + 1
    rows = [f"    {', '.join(log[begin:index])} >> {', '.join(log[index:end]) or '(end)'}" for log in (first, second)]
    return "\n".join([f"at launch {index}:", *rows])


def between_ranks(logs: Sequence[RankLog], *, merged: bool = False) -> list[str]:
    """How ranks differ from rank 0 in the order of each channel, or ``merged``: in that of both channels together."""
    found = []
    for rank, log in enumerate(logs[1:], 1):
        for channel in ("",) if merged else CHANNELS:
            where = first_difference(logs[0].of_channel(channel), log.of_channel(channel))
            found += [f"ranks 0 and {rank} {where}"] if where else []
    return found


def between_versions(before: Sequence[RankLog], after: Sequence[RankLog]) -> list[str]:
    """How a scenario's logs differ: in each channel, only in the two channels together, or in losses."""
    found = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        channels = [first_difference(old.of_channel(channel), new.of_channel(channel)) for channel in CHANNELS]
        if not any(channels) and (merged := first_difference(old.launches, new.launches)):
            channels = [f"only in the order of both channels together, {merged}"]
        found += [f"rank {rank} {where}" for where in channels if where]
        if where := first_difference(old.memory, new.memory):
            found.append(f"rank {rank} memory {where}")
        if bool(old.error) != bool(new.error):
            found.append(f"rank {rank} {old.end}, and then {new.end}")
        elif repr(old.losses) != repr(new.losses):
            largest = max((abs(a - b) for a, b in zip(old.losses, new.losses, strict=False)), default=0.0)
            found.append(f"rank {rank}: losses differ by at most {largest:.3g}")
    return found


def problems_of(logs: Logs) -> list[str]:
    """What is wrong with one version: ranks that differ in the order of a channel, and trainings that failed."""
    found = []
    for name, ranks in logs.items():
        errors = [f"rank {rank} {log.end}" for rank, log in enumerate(ranks) if log.error]
        # The ranks mostly fail in the same way.
        found += [f"{name}: {text}" for text in (*between_ranks(ranks), *errors[:1])]
    return found


def summarize(logs: Logs) -> Iterator[str]:
    """Lines on one version."""
    yield from problems_of(logs)
    merged = [name for name, ranks in logs.items() if between_ranks(ranks, merged=True)]
    yield from (f"{name}: ranks differ in the order of both channels together" for name in merged)
    yield f"{len(logs)} scenarios; ranks differ in the order of both channels together in {len(merged)}"


def compare(before: Logs, after: Logs) -> list[str]:
    """How two versions differ."""
    found = [f"{name}: only in one of the files" for name in sorted(before.keys() ^ after.keys())]
    for name in before:
        found += [f"{name}: {text}" for text in between_versions(before[name], after.get(name, before[name]))]
    return found


def read(path: Path) -> Logs:
    return {name: [RankLog(**log) for log in logs] for name, logs in json.loads(path.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.collective_log", description=__doc__)
    parser.add_argument("--out", type=Path, help="where the logs are written")
    parser.add_argument("--compare", type=Path, nargs=2, help="two files, of which nothing is recorded")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    parser.add_argument("--prefetch", choices=PREFETCH, default="both")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--graphs", type=int, default=80, help="how many random models")
    given = parser.parse_args()
    if given.compare:
        before, after = map(read, given.compare)
        for path, logs in zip(given.compare, (before, after), strict=True):
            print(f"-- {path}", *summarize(logs), sep="\n")
        differences = compare(before, after)
        print("-- differences between the files", *(differences or ["none"]), sep="\n")
        raise SystemExit(bool(differences))
    found: Logs = {}
    for kind in [given.only] if given.only else KINDS:
        began = time.monotonic()
        logs = record(scenarios_of(kind, given.transport, given.prefetch, given.graphs), given.ranks)
        found |= logs
        print(f"-- {kind}, {time.monotonic() - began:.0f} s", *summarize(logs), sep="\n", flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, default=dataclasses.asdict))


if __name__ == "__main__":
    main()
