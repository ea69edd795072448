"""Process groups, the transports between ranks, and what happens when ranks diverge."""

from .base import Transport, Work
from .group import Group, default_device

__all__ = ["Group", "Transport", "Work", "default_device"]
