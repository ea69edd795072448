"""Digests of the states at some steps: compared between ranks that hold copies, and written to the run folder.

[Note: When digests are taken]
Weights that an update overwrites, as at stages 1 and 2, are digested before it, since a bit that has flipped in a copy
since they were gathered would be gone after it. Everything else is digested after the update. One sum over the ranks
brings all numbers to all ranks. On a GPU the host reads them at the end of the next step, when they have arrived. So a
difference is an error of all ranks at the same place.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from zeroengine.checkpoint.content import random_states
from zeroengine.comm.watchdog import host_name
from zeroengine.engine.assembly import EngineParts
from zeroengine.errors import DivergenceError
from zeroengine.monitor.observer import Observer
from zeroengine.monitor.run_folder import append_to_file
from zeroengine.optim.state_digests import KINDS, differences, state_digests, weights_digests, whole_digests
from zeroengine.runtime.input_digest import can_read_values, digest_inputs
from zeroengine.utils.compiler_disable import hidden_from_activation_checkpoint
from zeroengine.utils.files import DIGEST_FORMAT, DIGESTS, GIVEN
from zeroengine.utils.formats import listed
from zeroengine.utils.tensors import HostCopy

log = logging.getLogger("zeroengine")

# The differences, and the ranks, that one message names.
NUM_SHOWN, MAX_RANKS_SHOWN = 3, 8


UnitDigests = list[torch.Tensor | None]


class StateDigests(Observer):
    """Takes the digests of one engine every few steps. ``step_ended`` and ``now`` are collectives.

    Args:
        parts: The parts of the engine.

    Attributes:
        names: The names of the units. Parts of a unit that are split, or not, have the name that the unit has in a
            model of which nothing is split, and one digest.
        taken: The digests of whole states of the last step that has any, by kind, 16 hexadecimal digits for each unit;
            with the number of the step. None before the first one.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._settings = parts, parts.setup.config.digests
        ranks, units, self._plans = parts.ranks, parts.partition.units, parts.setup.plans
        # Each rank of a split model has a part of its states. Replicas that train apart have states of their own.
        self._group = ranks.group if parts.setup.is_split else ranks.replica_group
        self.names = list(dict.fromkeys(plan.whole_name for plan in self._plans))
        self._unit_names = np.array([self.names.index(plan.whole_name) for plan in self._plans])
        self._num_holders = [(ranks.data_group(u) if u.is_split else self._group).world_size for u in units]
        # For each rank, and each unit, its number among the ranks with the same slices, and that of its slices.
        self._places = [[(rank, 0)] * len(units) for rank in range(self._group.world_size)]
        if parts.setup.is_split:
            places = [(unit.rank, ranks.slice_number(unit)) for unit in units]
            self._places = self._group.all_gather_object(places, "of slices")
        self._weights: UnitDigests | None = None
        parts.setup.partition_undo.hooks.callback(self.close)
        # What the micro-steps of the step in progress were given, where digests are due, in the order of ``GIVEN``.
        self._given: list[UnitDigests] = []
        # The step, and the numbers of all ranks, from the sum until the host reads them.
        self._pending: tuple[int, HostCopy] | None = None
        self.taken: tuple[int, dict[str, str]] | None = None
        self._hosts = ["this host"] * self._group.world_size
        monitor, every = parts.reports.monitor, self._settings.every
        # The run folder, on the rank that writes it.
        self._folder = None if monitor is None or every is None else monitor.folder
        if every is not None:
            self._hosts = self._group.all_gather_object(host_name() or platform.node(), "to name ranks that differ")
            start = {"units": self.names, "world_size": self._group.world_size, "time": time.time()}
            self._write({"format": DIGEST_FORMAT, **start})
            if parts.ranks.group.rank == 0 and self._folder is None:
                log.warning('digests: for zero-diff, name a run folder ("monitor": {"folder": "runs/a"}), too')

    @cached_property
    def _shards(self) -> np.ndarray:
        """Which shard each rank has of each state: of shape (ranks, states), by kind and then by unit."""
        units = self._parts.partition.units
        shards = [
            number * degree + unit.degrees.index(place, degree)
            for places in self._places
            for kind in KINDS
            for unit, (place, number) in zip(units, places, strict=True)
            for degree in [unit.degrees.optimizer if unit.trainable and kind != "weights" else unit.degrees.parameters]
        ]
        return np.array(shards).reshape(len(self._places), -1)

    @property
    def _is_due(self) -> bool:
        every = self._settings.every
        return every is not None and self._parts.loop.step_runner.next_number % every == 0

    def forward_began(self, args: Any, kwargs: Any) -> None:
        """Take the digest of the inputs."""
        if not self._is_due or not can_read_values(self._group.device):
            return
        with hidden_from_activation_checkpoint():
            # Python's and NumPy's generators begin with other states in each process.
            states = {name: random_states(self._group.device).get(name) for name in ("torch", "cuda")}
            inputs = digest_inputs((args, kwargs), self._group.device)
            # Each micro-step has a factor of its own, so that the order counts.
            factor = 2 * len(self._given) + 1
            given = inputs, digest_inputs(states, torch.device("cpu"))
            self._given.append([None if digest is None else digest.long() * factor for digest in given])

    def gradients_reduced(self) -> None:
        """Take the digests that come before the update of the step in progress. No unit is being gathered."""
        # Those of a step that raised are not of this one.
        is_due, units = self._is_due, self._parts.partition.units
        self._weights = weights_digests(units, self._num_holders) if is_due else None

    def step_ended(self, number: int) -> None:
        """Take the other digests of the step that has ended, if it is due, and compare copies.

        Raises:
            DivergenceError: On every rank: ranks that hold copies of a state have different values.
        """
        self._read()
        weights, self._weights = self._weights, None
        facts = [_total(digests) for digests in zip(*self._given, strict=True)]
        self.gradients_dropped()
        if weights is not None:
            self._pending = number, HostCopy(self._exchange(weights, facts))
            if self._group.device.type == "cpu":
                self._read()

    def now(self) -> dict[str, str]:
        """Return the digests of whole parameters and moments between two steps, as in ``taken``, and compare copies.

        Raises:
            DivergenceError: See ``step_ended``.
        """
        runner = self._parts.loop.step_runner
        runner.await_result()
        numbers = _as_numbers(HostCopy(self._exchange([None] * len(self._plans), None)))
        self._compare(runner.num_updates + runner.num_skipped, numbers)
        digests = self._whole(numbers)
        return {kind: digests[kind] for kind in ("parameters", "moments")}

    def gradients_dropped(self) -> None:
        """Forget what the step in progress was given."""
        self._given = []

    def by_unit(self, digests: str) -> dict[str, str]:
        """Return the digests of one kind by the name of the unit."""
        return {name: digests[16 * i : 16 * i + 16] for i, name in enumerate(self.names)}

    def close(self) -> None:
        """Read the digests of the last step. Each rank may come here alone."""
        try:
            self._read()
        except DivergenceError as error:
            # The run is over, so there is nothing to stop.
            log.error("%s", error)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line to the run folder, if this rank writes one."""
        if self._folder is not None:
            try:
                append_to_file(self._folder / DIGESTS, line)
            except OSError as error:
                self._folder = None
                log.warning("no further digests are written: %s", error.strerror)

    def _exchange(self, weights: UnitDigests, facts: UnitDigests | None) -> torch.Tensor:
        """Return the numbers of all ranks: int64, of shape (ranks, states), followed by what each rank was given.

        Args:
            weights: The digests of the weights.
            facts: Those of this rank's inputs and generators; None: no step has ended.
        """
        group, units = self._group, self._parts.partition.units
        states = state_digests(units, self._parts.states.optimizer, gradients=facts is not None)
        by_kind = [*states, weights, facts or [None, None]]
        zero = torch.zeros((), dtype=torch.int64, device=group.device)
        own = [
            zero if digest is None else digest.to(group.device, non_blocking=True)
            for digests in by_kind
            for digest in digests
        ]
        # Each rank fills its own row, so the sum over ranks has the rows of all.
        rows = torch.zeros(group.world_size, len(own), dtype=torch.int64, device=group.device)
        rows[group.rank] = torch.stack(own)
        group.all_reduce(rows, "of digests", in_step=facts is not None)
        return rows

    def _whole(self, numbers: np.ndarray) -> dict[str, str]:
        """Return the digests of whole states by kind."""
        by_unit = whole_digests(numbers[:, : self._shards.shape[1]], self._shards).reshape(len(KINDS), -1)
        by_name = [by_unit[:, self._unit_names == i].sum(axis=1) for i in range(len(self.names))]
        by_kind = np.stack(by_name, axis=1).astype(">u8")
        return {kind: digests.tobytes().hex() for kind, digests in zip(KINDS, by_kind, strict=True)}

    def _read(self) -> None:
        """Read the numbers that have been summed, if there are any; write them, and compare copies."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, copy = pending
        numbers = _as_numbers(copy)
        digests = self._whole(numbers)
        given = numbers[:, self._shards.shape[1] :].T.astype(">u8")
        digests |= {kind: of_ranks.tobytes().hex() for kind, of_ranks in zip(GIVEN, given, strict=True)}
        # The weights are compared only.
        del digests["weights"]
        self.taken = step, digests
        self._write({"step": step, **digests})
        self._compare(step, numbers)

    def _compare(self, step: int, numbers: np.ndarray) -> None:
        """Report ranks whose copies of a state differ."""
        found = differences(numbers[:, : self._shards.shape[1]], self._shards)
        if not found:
            return
        texts = []
        for state, ranks in found:
            kind, unit = divmod(state, len(self._plans))
            named = [f"rank {self._group.numbers[rank]} ({self._hosts[rank]})" for rank in ranks]
            texts.append(f"the {KINDS[kind]} of unit {self._plans[unit].name} on {listed(named, MAX_RANKS_SHOWN)}")
        text = (
            f"step {step}: ranks that hold copies of one state have different values, so memory, a link or a kernel "
            f"has changed some: {listed(texts, NUM_SHOWN)}. These ranks differ from most, or are all that have copies "
            "where there is no majority. Go on from a checkpoint of an earlier step, without their hosts; zero-replay "
            "takes the step again and shows what differs"
        )
        stops = self._settings.on_difference == "stop"
        self._parts.reports.event("error" if stops else "warning", step, text)
        if stops:
            raise DivergenceError(f'{text}. ("digests": {{"on_difference": "warn"}} would go on.)')
        if self._group.rank == 0:
            log.warning("%s", text)


def _total(digests: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of digests; None if there is none, or one of them is not known."""
    known = [digest for digest in digests if digest is not None]
    return torch.stack(known).sum() if known and len(known) == len(digests) else None


def _as_numbers(copy: HostCopy) -> np.ndarray:
    return np.array(copy.read(), dtype=np.int64).view(np.uint64)
