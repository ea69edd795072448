"""The degrees that plans for several nodes compare beside those of the stages: states partitioned within each node.

[Note: Which degrees are compared]
The network between nodes is slower than the links within one. Each choice takes memory to spare it:

    node            hybrid sharding (HSDP, MiCS): gathers stay within the node, and the sums of the nodes' shards cross
                    the network
    node/node/all   the same, with the optimizer's state partitioned over all ranks: the updated parameters cross the
                    network, too
    node/all/all    gathers stay within the node; the sums of the gradients and the updated parameters cross the network
    hpZ             stage 3 with a second copy of the parameters within the node (ZeRO++): the first gather of a step
                    crosses the network, and the others do not
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroengine.config import Config
from zeroengine.plan.seconds.machine import Machine
from zeroengine.plan.seconds.step_time import machine_of_replica

# What the configuration says, or else all ranks, as at every stage.
DEFAULT = "default"
# The value of ``zero_optimization.degrees`` by the name of each choice, the simplest first. All of them are stage 3.
DEGREES: Mapping[str, Mapping[str, str]] = {
    DEFAULT: {},
    "node": {"parameters": "node", "gradients": "node", "optimizer": "node"},
    "node/node/all": {"parameters": "node", "gradients": "node", "optimizer": "all"},
    "node/all/all": {"parameters": "node", "gradients": "all", "optimizer": "all"},
    "hpZ": {"parameters": "all", "secondary_parameters": "node"},
}
STAGE = 3


def degree_choices(written: bool, machine: Machine, config: Config) -> tuple[str, ...]:
    """Return the names of the degrees to compare.

    Args:
        written: Whether the configuration has degrees, which stay as they are.
        machine: The machine.
        config: The resolved configuration. With ``local_steps`` its degrees are those of one replica.
    """
    replica = machine_of_replica(machine, config)
    # On one node "node" is "all", and on nodes of one rank it partitions nothing.
    if written or replica.nodes == 1 or replica.ranks_per_node == 1:
        return (DEFAULT,)
    return tuple(DEGREES)


def has_second_copy(degrees: str) -> bool:
    """Return whether a choice keeps a second copy of the parameters."""
    return "secondary_parameters" in DEGREES[degrees]
