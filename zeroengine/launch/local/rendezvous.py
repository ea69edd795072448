"""The place that the launcher gives a node in a run, as torch elastic's rendezvous.

The launcher is connected to every node, so nobody has to find anybody: it knows who takes part, and says so. What is
left of a rendezvous is the store, which the first node's agent serves for all ranks.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

PATIENCE = datetime.timedelta(minutes=5)  # for a store's answer


@dataclass(frozen=True)
class Place:
    """One node's part of a run."""

    world_size: int
    address: str  # of the first node, as all nodes reach it
    port: int = 0  # of the store there; 0 where this node serves it and any port will do
    node: int = 0
    nodes: int = 1
    first_rank: int = 0
    restart: int = 0  # how often the run has been restarted
    run_id: str = "none"


class Rendezvous(RendezvousHandler):
    """See torch's `RendezvousHandler`. With `listener`, a bound socket, the store is served on it.

    Only this object holds the store: `close` ends it and frees its port, which the next round may need. The agent,
    which stays alive in reference cycles of its own, is given a store of this process alone.
    """

    def __init__(self, place: Place, listener: socket.socket | None = None) -> None:
        self.place = place
        self._listener = listener
        self._store: dist.Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        place, port = self.place, self.place.port
        if place.node == 0:
            fd = None if self._listener is None else self._listener.detach()
            self._store = dist.TCPStore(
                place.address, port, None, True, PATIENCE, wait_for_workers=False, master_listen_fd=fd
            )
            port = self._store.port
        alone = dist.HashStore()  # the launcher has told us all that agents tell each other through theirs
        return RendezvousInfo(alone, place.node, place.nodes, RendezvousStoreInfo(place.address, port))

    def close(self) -> None:
        """End the store, once no rank needs it any more."""
        self._store = None
        if self._listener is not None:
            self._listener.close()  # where the store was never started

    def get_backend(self) -> str:
        return "zero-launch"

    def get_run_id(self) -> str:
        return self.place.run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def shutdown(self) -> bool:
        return True
