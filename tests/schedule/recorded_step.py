"""What a rank does in one step, with the moment of each event, action and collective, in a run of two processes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.ranks import run_ranks
from zeroengine.comm.transports.gloo import GlooChannel, GlooWork
from zeroengine.monitor.timer import Timer
from zeroengine.optim.backends import interface
from zeroengine.runtime.executor import Executor
from zeroengine.schedule.schedule import Schedule

NUM_BLOCKS = 4
# What JSON holds: "units", "events" with their "actions", "collectives", and "spans". Times are in microseconds.
Record = dict[str, Any]


class Block(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks and a head, of about equally many parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8 * width, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(width, 8 * width, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embedding(tokens))), tokens)


def settings(width: int) -> dict[str, Any]:
    """Return a configuration that gathers one unit ahead, and reduces unit by unit."""
    unit_numel = 8 * width * width
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        # Collectives in shared memory proceed only within calls, so nothing would be gathered ahead.
        "comm": {"transport": "gloo"},
        "units": ["embedding", "blocks.*", "head"],
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "prefetch_bucket_size": int(1.5 * unit_numel),
            "reduce_bucket_size": unit_numel // 2,
        },
    }


class Recorder:
    """Notes what happens on this rank.

    Attributes:
        events: Each event, with its actions.
        collectives: Each gather and reduce, from its launch until it has arrived.
        spans: The update of each unit.
    """

    def __init__(self) -> None:
        self.events: list[Record] = []
        self.collectives: list[Record] = []
        self.spans: list[Record] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note what the engines do that are made meanwhile."""
        tell, let_perform, exchange, span = Executor.tell, Executor.let_perform, GlooChannel.exchange, Timer.span

        def timed_tell(executor: Executor, event: Any, *args: Any) -> None:
            entry: Record = {"event": type(event).__name__, "actions": [], "begin": time.perf_counter()}
            entry |= {"unit": unit} if (unit := unit_of(event, executor.schedule)) is not None else {}
            self.events.append(entry)
            tell(executor, event, *args)
            entry["end"] = time.perf_counter()

        def timed_let_perform(executor: Executor, action_type: Any, performer: Callable[[Any], None]) -> None:
            def perform(action: Any) -> None:
                entry = {"action": action_type.__name__, "unit": action.unit, "begin": time.perf_counter()}
                self.events[-1]["actions"].append(entry)
                performer(action)
                entry["end"] = time.perf_counter()

            let_perform(executor, action_type, perform)

        def timed_exchange(channel: GlooChannel, kind: str, label: str, *args: Any, **options: Any) -> GlooWork:
            entry: Record = {"kind": kind, "label": label, "begin": time.perf_counter()}
            work = exchange(channel, kind, label, *args, **options)
            self.collectives.append(entry)
            # From here on both threads wait for the one that this starts.
            work.watch()
            threading.Thread(target=note_arrival, args=(work, entry), daemon=True).start()
            return work

        def timed_span(timer: Timer, kind: Any, unit: str = "", label: str = "") -> AbstractContextManager[Any]:
            return self._updating(unit) if kind == "update" and unit else span(timer, kind, unit, label)

        with (
            mock.patch.object(Executor, "tell", timed_tell),
            mock.patch.object(Executor, "let_perform", timed_let_perform),
            mock.patch.object(GlooChannel, "exchange", timed_exchange),
            mock.patch.object(Timer, "span", timed_span),
            # Units are updated one by one where something shows the update of each.
            mock.patch.object(interface, "profiler_enabled", lambda: True),
        ):
            yield

    @contextlib.contextmanager
    def _updating(self, unit: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spans.append({"label": unit, "begin": begin, "end": time.perf_counter()})

    def take(self) -> Record:
        """Return what was noted since the last call."""
        taken = {"events": self.events, "collectives": self.collectives, "spans": self.spans}
        self.events, self.collectives, self.spans = [], [], []
        return taken


def unit_of(event: Any, schedule: Schedule) -> int | None:
    """Return the unit that an event concerns. None: the whole model."""
    if hasattr(event, "module"):
        (unit,) = schedule.forwards._units_of[event.module]
        return unit
    return event.visit.units[0] if hasattr(event, "visit") else getattr(event, "unit", None)


def note_arrival(work: GlooWork, entry: Record) -> None:
    """Wait on this thread until everything of a collective was sent and received."""
    while not work.done_within(1.0):
        pass
    entry["arrived"] = time.perf_counter()


def in_microseconds(record: Any, origin: float) -> Any:
    """Return a record whose moments are microseconds since ``origin``."""
    if isinstance(record, dict):
        return {key: in_microseconds(value, origin) for key, value in record.items()}
    if isinstance(record, list):
        return [in_microseconds(value, origin) for value in record]
    return round(1e6 * (record - origin)) if isinstance(record, float) else record


def record_steps(width: int, num_tokens: int, num_steps: int) -> list[Record]:
    """On one rank: return each step but the first, in which the order of units is learned."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    recorder, records = Recorder(), []
    with recorder.recording():
        engine = zeroengine.initialize(Model(width), config=settings(width))
        tokens = torch.randint(8 * width, (num_tokens,))
        for _ in range(num_steps + 1):
            recorder.take()
            begin = time.perf_counter()
            engine.backward(engine(tokens))
            engine.step()
            end = time.perf_counter()
            # Each collective has arrived, and the thread that notes this may have to run yet.
            time.sleep(0.05)
            step = {"units": [unit.name for unit in engine.units], "end": end, **recorder.take()}
            records.append(in_microseconds(step, begin))
        engine.close()
    return records[1:]


def pieces_of(step: Record) -> list[float]:
    """Return the times between the events of a step, and between its updates."""
    moments = sorted([*(entry["begin"] for key in ("events", "spans") for entry in step[key]), step["end"]])
    return [end - begin for begin, end in itertools.pairwise(moments)]


def quietest(steps: Sequence[Record]) -> Record:
    """Return the step that other processes of the machine disturbed least.

    That is the one whose longest delay is the shortest. A piece of a step is delayed by what it takes longer than the
    same piece of the quickest step.
    """
    shortest = [min(pieces) for pieces in zip(*map(pieces_of, steps), strict=True)]
    return min(
        steps, key=lambda step: max(piece - least for piece, least in zip(pieces_of(step), shortest, strict=True))
    )


def record_step(width: int = 320, num_tokens: int = 96, num_steps: int = 150) -> Record:
    """Return one of some steps of rank 0, the quietest one."""
    return quietest(run_ranks(2, record_steps, width, num_tokens, num_steps, timeout=600.0)[0])
