"""A node's assignment in a run, as torch elastic's rendezvous.

A rendezvous usually lets nodes find each other. Here the launcher is connected to every node and tells each one its
assignment, so only the store is left, which the first node's agent serves for all ranks.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass

# torch does not mark its stores as exported, so mypy does not see them there.
from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

STORE_TIMEOUT = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class NodeAssignment:
    """One node's part of a run."""

    world_size: int
    address: str  # the first node's address, as all nodes reach it
    port: int = 0  # of the store there; 0 if this node serves the store and any free port will do
    node: int = 0  # this node's index
    nodes: int = 1
    first_rank: int = 0
    restart: int = 0  # how often the run has been restarted
    run_id: str = "none"


class Rendezvous(RendezvousHandler):
    """Give torch elastic a node's assignment and the store. See torch's `RendezvousHandler` for the methods.

    Only this object holds the store: `close` ends it and frees its port, which the next round may need. The agent
    stays alive in reference cycles of its own, so it is given a separate store within this process.

    Args:
        assignment: The node's part of the run.
        listener: A bound socket on which the first node serves the store.
    """

    def __init__(self, assignment: NodeAssignment, listener: socket.socket | None = None) -> None:
        self.assignment = assignment
        self._listener = listener
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use this rendezvous' store as theirs."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the store on the first node, and return the node's index and where the store is."""
        assignment, port = self.assignment, self.assignment.port
        # Only the first node serves the store. The others learn its address from the launcher.
        if assignment.node == 0:
            # The socket is open already, so its port cannot be taken between the choice and the start of the store.
            fd = None if self._listener is None else self._listener.detach()
            # Waiting for workers would block this agent until the others connect, and the launcher has ordered them
            # already.
            store = TCPStore(assignment.address, port, None, True, STORE_TIMEOUT, False, master_listen_fd=fd)
            self._store, port = store, store.port
        # The agents have nothing to tell each other: the launcher has told them all.
        agent_store = HashStore()
        store_info = RendezvousStoreInfo(assignment.address, port)
        return RendezvousInfo(agent_store, assignment.node, assignment.nodes, store_info)

    def close(self) -> None:
        """End the store, once no rank needs it any more."""
        # Dropping the last reference ends the store's server. torch has no method for that.
        self._store = None
        if self._listener is not None:
            # A store that was started has taken the socket; otherwise its port would stay open.
            self._listener.close()

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "zero-launch"

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self.assignment.run_id

    def num_nodes_waiting(self) -> int:
        """Return 0: the launcher, not the agent, decides when a node joins."""
        return 0

    def is_closed(self) -> bool:
        """Return False: see `num_nodes_waiting`."""
        return False

    def set_closed(self) -> None:
        """Do nothing: see `num_nodes_waiting`."""

    def shutdown(self) -> bool:
        """Return True: `close` ends the store later, when the workers have ended."""
        return True
