"""Describe the ranks that are to run on several nodes, and write the messages that tell each node its part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroengine.launch.cluster import protocol
from zeroengine.launch.cluster.hosts import Host, processes_on
from zeroengine.launch.cluster.node_connection import NodeConnection
from zeroengine.launch.cluster.protocol import Message
from zeroengine.launch.cluster.shells import RemoteShell
from zeroengine.launch.local.job import CPU_PROCESSES


@dataclass(frozen=True)
class ClusterRequest:
    """What is to run, where, and how often it may be started again."""

    hosts: Sequence[Host]
    min_nodes: int  # with fewer nodes the run cannot go on
    shell: RemoteShell
    folder: str
    words: Sequence[str]  # the script, or -m and the module, and its arguments
    nproc: str = "auto"
    cpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # of every node's agent, which its ranks inherit
    ranks_environment: dict[str, str] = field(default_factory=dict)  # of every rank alone
    config: str | None = None  # every node must be able to read it
    overrides: Sequence[str] = ()
    address: str | None = None
    port: int = 0
    bind: str | None = None
    max_restarts: int = 0
    max_idle_rounds: int = protocol.MAX_IDLE_ROUNDS
    node_timeout_s: float = protocol.NODE_TIMEOUT_S
    connect_timeout_s: float = protocol.CONNECT_TIMEOUT_S
    import_timeout_s: float = protocol.IMPORT_TIMEOUT_S
    fan_out: int = protocol.FAN_OUT  # the number of nodes that are connected to at the same time
    run_id: str = "none"

    @property
    def elastic(self) -> bool:
        """Whether the run may go on without some of its nodes."""
        return self.min_nodes < len(self.hosts)

    @property
    def takes_nodes_back(self) -> bool:
        """Whether a node that was lost may come back."""
        return self.elastic or self.max_restarts > 0

    def facts_message(self, first: bool) -> Message:
        """Return the message that asks a node about itself.

        Args:
            first: Whether this is the first node, which checks the configuration for all of them.
        """
        checked = {"config": self.config, "overrides": list(self.overrides) if first else None}
        return {"do": "facts", "cpu": self.cpu, "silence": self.node_timeout_s, "words": list(self.words), **checked}

    def num_ranks_on(self, node: NodeConnection) -> int:
        """Return the number of ranks that the node has when it takes part."""
        gpus: int = node.facts["gpus"] if node.facts else 0
        return processes_on(node.host, self.nproc) or gpus or CPU_PROCESSES

    def run_message(self, node: NodeConnection, assignment: Message, full_world_size: int) -> Message:
        """Return the message that makes a node run its ranks.

        Args:
            node: The node; its ranks have been assigned.
            assignment: The fields of its `NodeAssignment`.
            full_world_size: The number of ranks when no node is missing.
        """
        host, environment = node.host, dict(self.ranks_environment)
        assert node.facts is not None
        if node.facts["gpus"] and (host.chosen is not None or node.nproc < node.facts["gpus"]):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, (host.chosen or range(node.nproc))[: node.nproc]))
        if self.elastic:
            environment["ZEROENGINE_FULL_WORLD_SIZE"] = str(full_world_size)
        where = {"place": assignment, "nproc": node.nproc, "host": host.label, "bind": self.bind}
        return {"do": "run", "environment": environment, "words": list(self.words), **where}
