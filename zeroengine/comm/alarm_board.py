"""Let the ranks raise alarms and report their positions, through the process group's store."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from zeroengine.utils.formats import counted, listed

T = TypeVar("T")
# A rank's watchdog answers within half a second. The rest allows for many ranks that use the store at once.
ANSWER_TIMEOUT_S = 4.0
READER_POLL_INTERVAL_S = 0.1
# The reader waits for answers during this part of the timeout. In the rest the report reaches all ranks.
READER_SHARE = 0.75
# If a reader ended without a report, the next reader gets this additional time.
PUBLISH_TIMEOUT_S = 1.0
# A rank that has answered an alarm within this time may have ended because of it. Its answer still counts then.
RECENT_ANSWER_S = 20.0
STORE_LINGER_S = 1.0
# What to write where ranks made different calls, or one has ended.
SAME_CALLS_ADVICE = (
    "Every rank must make the same calls: as many forwards, backwards and steps (give all ranks as many batches), and "
    "save_checkpoint(), full_state_dict() and evaluation on every rank rather than under `if rank == 0:`"
)
FORWARD_ADVICE = (
    "A forward is a collective where parameters are partitioned, also one of an evaluation or of generation. Give all "
    "ranks as many batches, and evaluate on every rank rather than under `if rank == 0:`. To run a forward on one rank "
    "alone, enter `with zeroengine.gathered(model):` around it on every rank"
)
# Leaving ``gathered`` before the backward would not help: the backward gathers the unit again, on some ranks alone.
DIFFERENT_UNITS_ADVICE = (
    "Every rank must run the same units in the same order. It may skip elements of a ModuleList or ModuleDict, such as "
    "experts, if it calls the module that holds them, and the others in the order of the list. Where each rank's data "
    "choose modules in other ways, put them into one unit, which every rank gathers as a whole: name a module that "
    'contains them all and that every rank calls under "units" in the configuration, such as "units": ["layers.*"]. '
    "Where there is no backward, as in generation, wrap the forwards in `with zeroengine.gathered(module):`"
)


class RankPosition(NamedTuple):
    """The position of a rank among its operations.

    Attributes:
        waits: Whether it waits for the operation; otherwise it has gone past it.
        what: The operation, for people.
        num_evaluated: The rank's forwards without gradients. See ``Divergence.num_forwards``.
        num_trained: Those with gradients.
    """

    waits: bool
    what: str
    num_evaluated: int = 0
    num_trained: int = 0


Answers = dict[int, tuple[int, RankPosition]]  # by rank: which alarm it answered, and where it was


class AlarmBoard:
    """Raises and answers alarms in the process group's store, through a client of its own.

    [Note: One reader for each alarm]
    Ranks that notice a stall together share one alarm, and the first of them reads the answers for all, so that the
    number of requests grows with the number of ranks and not with its square. The keys, for alarm n:

    - ``alarm``: the number of alarms so far;
    - ``reader/n``: the number of ranks that wanted to read the answers; the first to add to it does. If it ends before
      it has published them, the first to add to ``reader/n/1`` reads, and so on;
    - ``answers/n``: a line for each rank that has answered;
    - ``report/n``: all answers, published by the reader. A later question begins the next alarm.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str]) -> None:
        self.rank, self.hosts = rank, hosts
        self._store = store
        # The last alarm that this rank has answered, and the time of the answer by ``time.monotonic``.
        self._answered, self._answered_at = 0, 0.0
        # The rank and its watchdog's thread both answer, and each alarm is answered once.
        self._lock = threading.Lock()

    def answer(self, place: Callable[[], RankPosition]) -> None:
        """Answer the last alarm, if it is new. ``place`` is called only then."""
        with self._lock:
            # Adding 0 reads the number and makes the key where there is none. ``get`` would wait for the key.
            self._answer_alarm(self._store.add("alarm", 0), place)

    def ask(
        self, own: RankPosition, timeout_s: float = ANSWER_TIMEOUT_S, again: bool = False
    ) -> dict[int, RankPosition | None] | None:
        """Ask every rank for its position.

        Args:
            own: The position of this rank.
            timeout_s: Seconds to wait for the answers.
            again: Whether each rank must answer now. Otherwise an answer to a recent alarm counts for a rank that does
                not answer again: the report of that alarm may have ended it.

        Returns:
            Each rank's position, or None for a rank that does not answer in time. None if the store does not answer.
        """
        try:
            with self._lock:
                earlier = self._answered if time.monotonic() < self._answered_at + RECENT_ANSWER_S else 0
                alarm = max(1, self._store.add("alarm", 0))
                # An alarm whose report is out is over. Its answers would be older than this question.
                while self._store.check([f"report/{alarm}"]):
                    alarm += 1
                reads = self._store.add(f"reader/{alarm}", 1) == 1
                if reads:
                    # Only the reader raises the alarm, after it has won the key. All ranks answer from then on.
                    self._store.set("alarm", str(alarm))
                self._answer_alarm(alarm, lambda: own)
            answers = self._read(alarm, earlier, timeout_s) if reads else self._await_report(alarm, earlier, timeout_s)
        except RuntimeError:
            return None
        oldest = alarm if again else earlier or alarm
        places: dict[int, RankPosition | None] = dict.fromkeys(range(len(self.hosts)))
        places |= {rank: place for rank, (number, place) in answers.items() if number >= oldest}
        # This rank's own position is current, whatever it answered to an earlier alarm.
        return {**places, self.rank: own}

    def _answer_alarm(self, alarm: int, place: Callable[[], RankPosition]) -> None:
        if alarm > self._answered:
            self._answered, self._answered_at = alarm, time.monotonic()
            self._store.append(f"answers/{alarm}", json.dumps([self.rank, *place()]) + "\n")  # type: ignore[attr-defined]

    def _read(self, alarm: int, earlier: int, timeout_s: float) -> Answers:
        """Wait for the answers, and publish them; of ranks that do not answer, those to alarms from `earlier` on."""
        deadline = time.monotonic() + READER_SHARE * timeout_s
        lines = b""
        while lines.count(b"\n") < len(self.hosts) and time.monotonic() < deadline:
            time.sleep(READER_POLL_INTERVAL_S)
            lines = self._store.get(f"answers/{alarm}")
        answers: Answers = {}
        # Answers are read in the order of the alarms, so that the latest one of each rank remains.
        for number in range(earlier or alarm, alarm + 1):
            if self._store.check([key := f"answers/{number}"]):
                rows = map(json.loads, self._store.get(key).splitlines())
                answers |= {rank: (number, RankPosition(*place)) for rank, *place in rows}
        # Most ranks of a large run are at the same place, so the report names each place once.
        report = [[number, *place, ranks] for (number, place), ranks in ranks_by_value(answers).items()]
        self._store.set(f"report/{alarm}", json.dumps(report))
        return answers

    def _await_report(self, alarm: int, earlier: int, timeout_s: float) -> Answers:
        """Return the reader's report. If the reader has ended without one, read the answers instead."""
        key = f"report/{alarm}"
        for attempt in itertools.count(1):
            # A wait is one request, but polling would be dozens from each rank. The wait raises if the key does not
            # appear, and the check raises if the store is gone.
            with contextlib.suppress(RuntimeError):
                self._store.wait([key], datetime.timedelta(seconds=timeout_s))
            if self._store.check([key]):
                answers: Answers = {}
                for number, *place, ranks in json.loads(self._store.get(key)):
                    answers |= dict.fromkeys(ranks, (number, RankPosition(*place)))
                return answers
            # The first wait covered all of the reader's time. Each further reader only has to publish.
            timeout_s = PUBLISH_TIMEOUT_S
            if self._store.add(f"reader/{alarm}/{attempt}", 1) == 1:
                # The previous reader may have ended before it raised the alarm.
                self._store.set("alarm", str(alarm))
                break
        return self._read(alarm, earlier, PUBLISH_TIMEOUT_S)

    def report(self, own: RankPosition) -> str:
        """Describe the positions of all ranks in one sentence. Waits a few seconds for their answers."""
        sentence = self.describe(self.ask(own), own)
        if self.rank == 0:
            # The others ask at about the same time, and the store ends with this rank.
            time.sleep(STORE_LINGER_S)
        return sentence

    def describe(self, places: Mapping[int, RankPosition | None] | None, own: RankPosition) -> str:
        """Describe the answers of ``ask`` in one sentence. ``own`` is this rank's position."""
        if places is None:
            return f"{describe_positions({self.rank: own}, self.hosts)}; the store (hosted by rank 0) does not answer"
        return describe_positions(places, self.hosts)


def describe_positions(places: Mapping[int, RankPosition | None], hosts: Sequence[str]) -> str:
    """Say where the ranks are, in one sentence.

    Ranks at one position are named together, the smallest group first: it is most likely to be the cause. Where all
    wait for gathers of different units, or are at different places, advice follows.

    Args:
        places: Each rank's position; None where it does not answer.
        hosts: Each rank's host by name.
    """
    groups = ranks_by_value(dict(sorted(places.items())))
    # Ranks that do not answer come first, then the smallest group.
    *few, most = sorted(groups, key=lambda place: (place is not None, len(groups[place])))
    parts = [_sentence(_names(groups[place], hosts), len(groups[place]) > 1, place) for place in few]
    several = len(groups[most]) > 1
    names = "the others" if several and few else _names(groups[most], hosts)
    sentence = ", ".join([*parts, _sentence(names, several, most)])
    if len(groups) == 1:
        return sentence
    forwards = compare_forwards({rank: place[2:] for rank, place in places.items() if place})
    # No rank can go on where each waits for a gather and these differ.
    if all(place and place.waits and place.what.startswith("gather ") for place in groups):
        return f"{sentence}. {advise_on_units(forwards)}"
    return f"{sentence}. {forwards}{SAME_CALLS_ADVICE}"


def compare_forwards(num_forwards: Mapping[int, Sequence[int]]) -> str:
    """Return a sentence on the ranks that have begun more forwards than others, or an empty string.

    An evaluation on one rank is named and not the next training step of the others, which have gone on meanwhile.

    Args:
        num_forwards: Of each rank, as in ``Divergence.num_forwards``.
    """
    # Ranks that the first kind keeps from going on have begun fewer of the second, and are not to be held up for that.
    for index, kind in enumerate(("without", "with")):
        ranks = ranks_by_value({rank: numbers[index] for rank, numbers in num_forwards.items()})
        if len(ranks) > 1:
            most, fewest = (f"rank{'s' * (len(ranks[n]) > 1)} {listed(ranks[n], 4)}" for n in (max(ranks), min(ranks)))
            forwards = counted(max(ranks) - min(ranks), "more forward")
            return f"{most.capitalize()} began {forwards} {kind} gradients than {fewest}. "
    return ""


def advise_on_units(forwards: str) -> str:
    """Return what to write where ranks gather different units. ``forwards``: what ``compare_forwards`` has returned."""
    return f"{forwards}{FORWARD_ADVICE}" if forwards else DIFFERENT_UNITS_ADVICE


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return the ranks of each value, for a value of each rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _sentence(names: str, several: bool, place: RankPosition | None) -> str:
    if place is None:
        return f"{names} do{'' if several else 'es'} not answer (ended?)"
    if place.waits:
        return f"{names} wait{'' if several else 's'} at {place.what}"
    return f"{names} {'are' if several else 'is'} at {place.what}"


def _names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ``rank 3 (node-b)``, or ``ranks 2, 3 (node-b) and 5 (node-c)``."""
    ranks_of_host = ranks_by_value({rank: hosts[rank] for rank in ranks})
    parts = [", ".join(map(str, own)) + (f" ({host})" if host else "") for host, own in ranks_of_host.items()]
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(parts)}"
