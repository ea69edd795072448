"""Process groups, the transports between ranks, and what happens when ranks diverge."""

from typing import TYPE_CHECKING, NoReturn

from ..migration import comm_attribute
from .base import Buffer, ChannelName, Transport, Work
from .crossing import HostCopy, to_device
from .group import Group, as_process_group, backend_of, check_same, default_device
from .launched import join_launched_ranks
from .registered import LEAST_SYMMETRIC
from .span import span

__all__ = [
    "LEAST_SYMMETRIC",
    "Buffer",
    "ChannelName",
    "Group",
    "HostCopy",
    "Transport",
    "Work",
    "as_process_group",
    "backend_of",
    "check_same",
    "default_device",
    "join_launched_ranks",
    "span",
    "to_device",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(comm_attribute(name))
