"""Process groups, the transports between ranks, and what happens when ranks diverge."""

from .base import Buffer, ChannelName, Transport, Work
from .crossing import HostCopy, to_device
from .group import Group, backend_of, default_device
from .registered import LARGE
from .span import span

__all__ = [
    "LARGE",
    "Buffer",
    "ChannelName",
    "Group",
    "HostCopy",
    "Transport",
    "Work",
    "backend_of",
    "default_device",
    "span",
    "to_device",
]
