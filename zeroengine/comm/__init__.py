"""Process groups, the transports between ranks, and what happens when ranks diverge."""

from .base import Buffer, Transport, Work
from .group import Group, backend_of, default_device

__all__ = ["Buffer", "Group", "Transport", "Work", "backend_of", "default_device"]
