"""What is to run on several nodes, and what each is told about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroengine.launch.cluster.hosts import Host, processes
from zeroengine.launch.cluster.node_connection import Link
from zeroengine.launch.cluster.protocol import SILENCE, Message
from zeroengine.launch.cluster.shells import Shell
from zeroengine.launch.local.job import CPU_PROCESSES

IDLE_ROUNDS = 3
CONNECT = 30.0  # seconds for a connection, from nothing to a Python that speaks
IMPORT = 120.0  # seconds for that Python to import torch from a cold disk
FAN_OUT = 64  # nodes that are connected to at a time


@dataclass(frozen=True)
class Request:
    """What is to run, where, and how often it may be started again."""

    hosts: Sequence[Host]
    least: int  # nodes with which the run may go on
    shell: Shell
    folder: str
    target: str
    arguments: Sequence[str]
    module: bool = False
    nproc: str = "auto"
    cpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # forwarded to every node
    ranks_environment: dict[str, str] = field(default_factory=dict)  # given to every rank
    config: str | None = None  # that every node must be able to read
    overrides: Sequence[str] = ()
    address: str | None = None
    port: int = 0
    bind: str | None = None
    restarts: int = 0
    idle_rounds: int = IDLE_ROUNDS  # so many rounds in a row without a step end an elastic run
    silence: float = SILENCE
    connect_timeout: float = CONNECT
    import_timeout: float = IMPORT
    fan_out: int = FAN_OUT
    run_id: str = "none"

    @property
    def elastic(self) -> bool:
        return self.least < len(self.hosts)

    @property
    def returns(self) -> bool:
        """Whether a node that was lost may come back."""
        return self.elastic or self.restarts > 0

    def facts(self, first: bool) -> Message:
        """What a node is to find out about itself; the first one checks the configuration as well."""
        overrides = list(self.overrides) if first else None
        asked = {"target": self.target, "module": self.module, "config": self.config, "overrides": overrides}
        return {"do": "facts", "cpu": self.cpu, "silence": self.silence, **asked}

    def count(self, link: Link) -> int:
        """The ranks that the node has when it takes part."""
        gpus: int = link.facts["gpus"] if link.facts else 0
        return processes(link.host, self.nproc) or gpus or CPU_PROCESSES

    def order(self, link: Link, place: Message, full_world_size: int) -> Message:
        """That a node runs its ranks."""
        host, environment = link.host, dict(self.ranks_environment)
        assert link.facts is not None
        if link.facts["gpus"] and (host.chosen is not None or link.nproc < link.facts["gpus"]):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, (host.chosen or range(link.nproc))[: link.nproc]))
        if self.elastic:
            environment["ZEROENGINE_FULL_WORLD_SIZE"] = str(full_world_size)
        return {
            "do": "run",
            "place": place,
            "nproc": link.nproc,
            "host": host.label,
            "target": self.target,
            "arguments": list(self.arguments),
            "module": self.module,
            "environment": environment,
            "bind": self.bind,
        }
