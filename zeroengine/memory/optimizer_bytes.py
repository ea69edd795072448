"""The bytes of the optimizer on rank 0: its state, and the memory that an update takes beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from zeroengine.memory.optimizer_state import OptimizerProbe, StateSizes
from zeroengine.memory.unit_bytes import UnitBytes
from zeroengine.optim.backends.fused_update import FusedUpdate
from zeroengine.optim.backends.interface import UpdateRule
from zeroengine.optim.backends.muon_update import MuonUpdate
from zeroengine.optim.backends.over_owners import OptimizerOverOwners
from zeroengine.optim.backends.owner_exchange import ExchangeRule
from zeroengine.optim.backends.torch_update import WholeUpdate
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.partition.owners import PlannedRound, plan_rounds

EXCHANGES: dict[type[UpdateRule], ExchangeRule] = {
    MuonUpdate: MuonUpdate.EXCHANGE,
    WholeUpdate: OptimizerOverOwners.EXCHANGE,
}


class UnitState(NamedTuple):
    """The optimizer's state of one unit on rank 0.

    Attributes:
        nbytes: All of it.
        element_sizes: The bytes of an element of each state with a value per element; the most of all parameters.
        is_whole: Whether it is that of the whole parameters that rank 0 owns, and not of a shard.
    """

    nbytes: int = 0
    element_sizes: tuple[int, ...] = ()
    is_whole: bool = False


class OptimizerBytes(NamedTuple):
    """What the optimizer takes on rank 0.

    Attributes:
        states: The state of each unit. Frozen ones have none.
        exchange: Bytes of the memory in which matrices travel to their owners, where the transport keeps it.
        transient: The most bytes of the device's memory that an update takes for a moment: those of the exchange where
            they are freed after it, and what an optimizer of torch takes, which is gradients in the dtype of the
            masters and, if it updates whole parameters, their values.
    """

    states: Sequence[UnitState]
    exchange: int
    transient: int


def predict_optimizer(
    units: Sequence[UnitBytes], probe: OptimizerProbe, *, kept_among: Collection[str]
) -> OptimizerBytes:
    """Return what the optimizer takes on rank 0.

    Args:
        units: The units.
        probe: What is known of the optimizer.
        kept_among: Among which ranks (``PlannedRound.among``) a transport keeps the memory that operations send from.
    """
    states, exchange, transient = [UnitState()] * len(units), 0, 0
    # All degrees above 1 have the same rules.
    degree = max((unit.degrees.optimizer for unit in units), default=1)
    for member, rule in zip(members_of(probe.optimizer), probe.rules(min(degree, 2)), strict=True):
        groups = {param: group for group in member.param_groups for param in group["params"]}
        own = {i: unit for i, unit in enumerate(units) if unit.optimizer_numel and unit.plan.params[0][1] in groups}
        rounds, sent = _exchange(own, groups, EXCHANGES[rule]) if rule in EXCHANGES else ([], Counter())
        owned = {part.matrix for planned in rounds for part in planned.plan.received}
        copied = 0
        for i, unit in own.items():
            # What the rule keeps state of: the index of a parameter, and elements of it.
            algorithm = unit.plan.algorithm
            if rule.has_moments:
                # Muon's momentum has the dtype of the masters.
                size = algorithm.moments_dtype.itemsize if rule is FusedUpdate else unit.master_dtype.itemsize
                parts = [(0, unit.optimizer_numel)]
                of_param = [StateSizes((size,) * algorithm.num_moments, ())]
            else:
                parts = [(span.param_index, span.numel) for span in unit.layout.spans(0, unit.degrees.optimizer)]
                if rule is WholeUpdate:
                    parts = [(matrix.param_index, matrix.numel) for matrix in owned if matrix.unit == i]
                of_param = [probe.sizes(param, unit.master_dtype) for _, param in unit.plan.params]
                copied += sum(numel for _, numel in parts) * unit.master_dtype.itemsize
            nbytes = sum(n * sum(of_param[k].element_sizes) + sum(of_param[k].number_sizes) for k, n in parts)
            if algorithm.block > 1:
                nbytes = sum(algorithm.moment_bytes(unit.optimizer_numel))
            states[i] = UnitState(nbytes, max((of.element_sizes for of in of_param), key=sum), rule is WholeUpdate)
        exchange += sum(nbytes for among, nbytes in sent.items() if among in kept_among)
        # The rules update one after another. Whole parameters are copied beside their gradients.
        freed = sum(nbytes for among, nbytes in sent.items() if among not in kept_among)
        transient = max(transient, copied * (2 if rule is WholeUpdate else 1) + freed)
    return OptimizerBytes(states, exchange, transient)


def _exchange(
    units: Mapping[int, UnitBytes], groups: Mapping[nn.Parameter, Mapping[str, Any]], rule: ExchangeRule
) -> tuple[list[PlannedRound], Counter[str]]:
    """Return what rank 0 does in each round of an exchange, and the bytes of its memory, by ``PlannedRound.among``.

    Args:
        units: The units, by their indices.
        groups: The group of each parameter.
        rule: What is exchanged.
    """
    exchanged = []
    for index, unit in units.items():
        assert unit.gradients is not None
        of_params = {param: groups[param] for _, param in unit.plan.params}
        exchanged.append(rule.exchanged(index, 0, unit.layout, of_params, unit.gradients.dtype, unit.master_dtype))
    rounds = plan_rounds(exchanged, rule.cost)
    nbytes = Counter[str]()
    for (among, _, dtype), numels in rule.memory_sizes(rounds).items():
        nbytes[among] += sum(numels) * dtype.itemsize
    return rounds, nbytes
