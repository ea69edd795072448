"""The collectives of one step: which units are gathered and reduced, how often, and among which ranks.

[Note: Which collectives there are]
gathers   of units that are released between uses. A forward gathers a unit for each module that needs it. A backward
          gathers it once, and releases it when it has all of its gradients; a frozen unit has none, and is gathered for
          each module. The unit that a forward needs last stays from its first use until then. With a second copy of the
          parameters all but the first gather of a trainable unit in a step come from its ranks. Elements of a list of
          which a rank may use only some, such as experts, are gathered by all ranks as if each used all of them (see
          ``partition.unit_lists``)
updates   where the optimizer's degree is above that of the parameters: gathers of each unit after its update
reduces   of gradients that are sharded: in each micro-step. Of others: once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroengine.memory.unit_bytes import UnitBytes


class GatherBytes(NamedTuple):
    """An all-gather of one unit: of shards at ``degree`` into shards at ``within``, which is 1 for the full buffer.

    Attributes:
        unit: The unit.
        degree: The degree of the shards that are sent.
        within: The degree of what they become.
        is_exact: Whether values are never quantized: after an update, and of the second copy of the parameters.
    """

    unit: UnitBytes
    degree: int
    within: int = 1
    is_exact: bool = False


@dataclass(frozen=True)
class StepCollectives:
    """The collectives of a step, in the order of the model.

    Attributes:
        first: The gathers of the first forward.
        later: Those of each other forward.
        backward: Those of each backward, the first to be needed first.
        updates: The gathers after an update.
        sharded: The units whose gradients are reduced in each micro-step.
        whole: The units whose gradients are reduced once.
        micro_steps: The number of micro-steps.
    """

    first: Sequence[GatherBytes]
    later: Sequence[GatherBytes]
    backward: Sequence[GatherBytes]
    updates: Sequence[GatherBytes]
    sharded: Sequence[UnitBytes]
    whole: Sequence[UnitBytes]
    micro_steps: int

    @classmethod
    def of_units(cls, units: Sequence[UnitBytes], micro_steps: int) -> StepCollectives:
        """Return the collectives of a step with so many micro-steps."""
        gathered = [unit for unit in units if unit.degrees.parameters > 1]
        # The module that is registered last is taken to be the last of the forward.
        last = max(gathered, key=lambda unit: max(unit.plan.positions, default=-1), default=None)
        first: list[GatherBytes] = []
        later: list[GatherBytes] = []
        backward: list[GatherBytes] = []
        for unit in gathered:
            again = GatherBytes(
                unit, unit.degrees.secondary or unit.degrees.parameters, is_exact=unit.degrees.secondary > 0
            )
            # A unit of several modules is such as an embedding that is tied to the head.
            uses = unit.plan.num_uses
            forward_uses = min(uses, 1) if unit is last else uses
            later += [again] * forward_uses
            # The second copy of a frozen unit is never out of date.
            at_first = GatherBytes(unit, unit.degrees.parameters) if unit.plan.trainable else again
            first += [at_first, *[again] * (forward_uses - 1)][:forward_uses]
            backward_uses = min(uses, 1) if unit.plan.trainable else uses
            backward += [again] * max(0, backward_uses - (unit is last))
        trained = [unit for unit in units if unit.gradients is not None]
        return cls(
            first=first,
            later=later,
            backward=backward[::-1],
            updates=[
                GatherBytes(unit, unit.degrees.optimizer, unit.degrees.parameters, is_exact=True)
                for unit in trained
                if unit.degrees.optimizer > unit.degrees.parameters
            ],
            sharded=[unit for unit in trained if unit.gradients is not None and unit.gradients.is_sharded],
            whole=[unit for unit in trained if unit.gradients is not None and not unit.gradients.is_sharded],
            micro_steps=micro_steps,
        )
