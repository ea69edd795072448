"""The rounds of ``local_steps``: count their steps, end them, and make replicas equal before a save.

[Note: Where replicas are equal]
After an outer step the replicas have the same parameters. Their optimizer states stay apart (DiLoCo, section 2), and so
do counters, since each replica skips its own overflows. A save ends the round, takes the mean of the states and the
first replica's counters, so that one replica stands for all: a run that goes on and a run that is resumed have the same
bits.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from zeroengine.engine.assembly import EngineParts
from zeroengine.optim.backends.interface import StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.outer_step import OuterStep
from zeroengine.optim.replica_mean import Region
from zeroengine.partition.layout import ShardSpan


class ReplicaRounds:
    """Counts the steps of a round, and ends it. All methods are collectives, and do nothing without ``local_steps``.

    Args:
        parts: The parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._outer_step = parts, parts.states.outer_step
        section = parts.setup.config.local_steps
        self._steps_per_round = 1 if section is None else section.steps
        # The steps since the replicas had the same parameters, and whether they have different optimizer states.
        self._num_steps = 0
        self._states_differ = False

    @property
    def ends_with_this_step(self) -> bool:
        """Whether the step in progress is the last of its round, so that replicas meet. True without replicas."""
        return self._num_steps + 1 >= self._steps_per_round

    def end_step(self) -> None:
        """Count a step, and end the round after its last one."""
        if self._outer_step is not None:
            self._num_steps += 1
            self._states_differ = True
            if self._num_steps >= self._steps_per_round:
                self.end_round()

    def end_round(self) -> bool:
        """Give all replicas the result of an outer step, unless they have taken no step since the last one.

        Returns:
            Whether the parameters have changed.

        Raises:
            DivergenceError: A replica does something else, or does not come.
        """
        parts = self._parts
        if self._outer_step is None or not self._num_steps:
            return False
        # Masters take over what the user wrote into the model since the last step.
        parts.states.master_weights.settle()
        # Ranks of the replica may still read parameters in place that change below.
        parts.ranks.transport.fence()
        issued = parts.loop.step_runner.issued_step
        self._outer_step.run(f"outer step after step {issued.number if issued is not None else 0}")
        parts.states.master_weights.publish()
        self._num_steps = 0
        return True

    # -- saving and loading -----------------------------------------------------------------------

    def make_replicas_equal(self) -> None:
        """End the round, and give all replicas one optimizer state and the same counters. See the note above."""
        self.end_round()
        if self._outer_step is not None and self._states_differ:
            self._adopt_counters()
            regions = list(_state_regions(self._parts, self._outer_step))
            self._outer_step.mean.run(regions, "mean of optimizer states")
            self._parts.partition.placement.evict()
            self._states_differ = False

    def restart(self, missing: Sequence[str], *, loads_state: bool) -> None:
        """Begin a round with parameters that were loaded.

        Args:
            missing: The parameters that were not loaded. Those go on with the round in progress.
            loads_state: Whether the optimizer's state was loaded or reset, too.
        """
        if self._outer_step is None:
            return
        self._outer_step.set_anchor(set(missing))
        self._states_differ = self._states_differ and not loads_state
        trained = {slot.name for outer in self._outer_step.shards for slot in outer.shard.unit.layout.slots}
        if loads_state and not trained & set(missing):
            self._num_steps = 0

    def _adopt_counters(self) -> None:
        """Take over the first replica's counters, schedule and hyperparameters, if any replica differs from it."""
        parts = self._parts
        assert parts.ranks.replicas is not None
        parts.loop.step_runner.await_result()
        facts = _facts(parts)
        # The facts grow with the number of parameters and seldom differ, so digests are exchanged first.
        digest = hashlib.sha256(pickle.dumps(facts)).hexdigest()
        counterparts = parts.ranks.replicas.counterparts
        if len(set(counterparts.all_gather_object(digest, "to compare the replicas' counters"))) > 1:
            _apply(parts, counterparts.all_gather_object(facts, "of the replicas' counters")[0])


def _facts(parts: EngineParts) -> dict[str, Any]:
    """Return what a replica counts by itself: counters, schedule, hyperparameters, and numbers in the state."""
    runner, schedule = parts.loop.step_runner, parts.states.lr_schedule.current
    states: dict[tuple[int, int], tuple[StateKeys, dict[str, Any]]] = {}
    for shard, span in _spans(parts):
        state = parts.states.optimizer.state_of(shard).of(shard, span)
        keys: StateKeys = {key: (value.dtype, None) for key, value in state.elements.items()}
        keys |= {key: (value.dtype, tuple(value.shape)) for key, value in state.numbers.items()}
        numbers = {key: value.tolist() for key, value in state.numbers.items()}
        states[shard.index, span.param_index] = (keys, numbers)
    return {
        "counters": (runner.num_updates, runner.num_skipped),
        "schedule": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
        "groups": [_plain_values(group) for group in parts.states.optimizer.param_groups],
        "states": states,
    }


def _plain_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group, tensors as numbers."""
    values = {key: value for key, value in group.items() if key != "params"}
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _apply(parts: EngineParts, facts: dict[str, Any]) -> None:
    """Take over ``facts`` of another replica."""
    runner = parts.loop.step_runner
    runner.num_updates, runner.num_skipped = facts["counters"]
    if facts["schedule"] is not None:
        parts.states.lr_schedule.current.load_state_dict(facts["schedule"])
    # Some schedules write learning rates when they are loaded, so the groups come last.
    for group, values in zip(parts.states.optimizer.param_groups, facts["groups"], strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value
    for shard, span in _spans(parts):
        shard_state = parts.states.optimizer.state_of(shard)
        keys, numbers = facts["states"][shard.index, span.param_index]
        if keys:
            # States that this replica lacks begin with zeros.
            shard_state.create(shard, span, keys)
        else:
            shard_state.clear(shard, span)
        shard_state.set_numbers(
            shard, span, {key: torch.tensor(number, dtype=keys[key][0]) for key, number in numbers.items()}
        )


def _spans(parts: EngineParts) -> Iterator[tuple[OptimizerShard, ShardSpan]]:
    for shard in parts.states.optimizer.shards:
        for span in parts.states.optimizer.state_of(shard).spans(shard):
            yield shard, span


def _state_regions(parts: EngineParts, outer_step: OuterStep) -> Iterator[Region]:
    """Yield the optimizer's states with a value for each element."""
    for outer in outer_step.shards:
        shard, state = outer.shard, parts.states.optimizer.state_of(outer.shard)
        whole = state.whole_shard_tensors(shard)
        if whole:
            yield from (replace(outer.region, values=tensor) for tensor in whole)
            continue
        # States of single parameters do not divide into equal pieces, so each rank averages all that it holds.
        for span in state.spans(shard):
            for value in state.of(shard, span).elements.values():
                if value.is_floating_point() or value.is_complex():
                    yield Region(value, (0,), 0, shard.store)
