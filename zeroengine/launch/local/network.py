"""Addresses, ports and interfaces of this node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence

SIOCGIFADDR = 0x8915
TIMEOUT = 5.0  # seconds for a connection to the first node


def listen(port: int, host: str = "") -> socket.socket:
    """A socket that listens on every address of this node, or on an IPv4 one alone, at any free port for 0.

    Raises:
        OSError: the port is in use; the message says so.
    """
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is in use. Choose another with --port, or leave --port out") from None
        raise OSError(f"port {port} cannot be opened ({error.strerror})") from None


def forget_callers(listener: socket.socket) -> None:
    """Close the connections that were made to see whether it can be reached."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)


def own_address(reached_at: str | None, others: Sequence[str]) -> str:
    """The address at which the other nodes reach this one.

    Args:
        reached_at: that at which the launcher did, where it is known.
        others: addresses of other nodes.
    """
    if reached_at and not _is_loopback(reached_at):
        return reached_at
    for other in others:
        if not _is_loopback(other) and (address := _towards(other)):
            return address
    return reached_at or ("127.0.0.1" if not others else socket.gethostname())


def reach(address: str, port: int) -> str:
    """Connect there once; returns the address of this node that the connection has.

    Raises:
        OSError: it cannot be reached.
    """
    with socket.create_connection((address, port), timeout=TIMEOUT) as connection:
        own: str = connection.getsockname()[0]
        return own


def interface_of(address: str) -> str | None:
    """The network interface that has the address."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped:
        wanted = wanted.ipv4_mapped
    if isinstance(wanted, ipaddress.IPv6Address):
        return _interface_of_6(wanted)
    return next((name for _, name in socket.if_nameindex() if address_of(name) == str(wanted)), None)


def address_of(interface: str) -> str | None:
    """Its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _interface_of_6(wanted: ipaddress.IPv6Address) -> str | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
            for line in file:
                number, *_, name = line.split()
                if int(number, 16) == int(wanted):
                    return name
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _towards(address: str) -> str | None:
    """The own address on the way there; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            own: str = probe.getsockname()[0]
            return own
    return None
