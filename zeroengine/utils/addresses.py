"""Find the address at which other nodes reach this one. This file needs no torch."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence


def own_address(reached_at: str | None, others: Sequence[str]) -> str:
    """Return the address at which the other nodes reach this one.

    Args:
        reached_at: The address at which the launcher reached this node, if it is known.
        others: Addresses of other nodes.
    """
    # A loopback address leads every node to itself, so it is of no use to the others.
    if reached_at and not is_loopback(reached_at):
        return reached_at
    # The route to another node shows which of this node's addresses is on the same network.
    for other in others:
        if not is_loopback(other) and (address := source_address_for(other)):
            return address
    return reached_at or ("127.0.0.1" if not others else socket.gethostname())


def is_loopback(address: str) -> bool:
    """Return whether an address leads every node to itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def source_address_for(address: str) -> str | None:
    """Return this node's address on the way to another one."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, destination = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket chooses a route and sends nothing.
            probe.connect(destination)
            return str(probe.getsockname()[0])
    return None
