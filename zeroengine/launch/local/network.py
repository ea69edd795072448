"""Find addresses, ports and interfaces of this node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
import sys

from zeroengine.errors import LaunchError

SIOCGIFADDR = 0x8915
# The seconds that a connection to the first node may take.
CONNECT_TIMEOUT_S = 5.0


def open_listener(port: int, host: str = "") -> socket.socket:
    """Open a socket that listens on every address of this node.

    Args:
        port: The port; 0 for any free one.
        host: The only IPv4 address to listen on; empty for all of them.

    Raises:
        LaunchError: The port is in use; the message says so.
    """
    # One IPv6 socket can take IPv4 connections as well. All ranks connect at the same moment, hence the long backlog.
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"port {port} is in use. Choose another with --port, or leave --port out") from None
        raise LaunchError(f"port {port} cannot be opened ({error.strerror})") from None


def drop_pending_connections(listener: socket.socket) -> None:
    """Close the connections that other nodes made only to see whether the socket can be reached."""
    # The socket must not block, or the last `accept` would wait for another connection.
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    # torch's store expects a socket that blocks.
    listener.setblocking(True)


def try_connection(address: str, port: int) -> str:
    """Connect there once, and return the connection's address on this node.

    Raises:
        OSError: The address cannot be reached.
    """
    with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
        return str(connection.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has the address."""
    try:
        # A link-local address carries its interface after a percent sign, which the parser does not take.
        ip_address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    # A socket for both families reports IPv4 peers in this form.
    if isinstance(ip_address, ipaddress.IPv6Address) and ip_address.ipv4_mapped:
        ip_address = ip_address.ipv4_mapped
    if isinstance(ip_address, ipaddress.IPv6Address):
        return _interface_of_ipv6(ip_address)
    return next((name for _, name in socket.if_nameindex() if address_of(name) == str(ip_address)), None)


def address_of(interface: str) -> str | None:
    """Return the interface's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # The kernel takes names of at most 15 bytes.
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _interface_of_ipv6(ip_address: ipaddress.IPv6Address) -> str | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
            for line in file:
                number, *_, name = line.split()
                if int(number, 16) == int(ip_address):
                    return name
    return None
