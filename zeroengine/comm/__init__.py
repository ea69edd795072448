"""Process groups, the transports between ranks, and what happens when ranks diverge."""

from .base import Buffer, Transport, Work
from .crossing import HostCopy, to_device
from .group import Group, backend_of, default_device
from .span import span

__all__ = [
    "Buffer",
    "Group",
    "HostCopy",
    "Transport",
    "Work",
    "backend_of",
    "default_device",
    "span",
    "to_device",
]
