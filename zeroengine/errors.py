"""The errors that users see. `assert` is kept for our own mistakes."""

from __future__ import annotations


class ZeroEngineError(ValueError):
    """Base of every error raised for wrong input.

    The message says what was found, where, and what to write instead.
    """


class ConfigError(ZeroEngineError):
    """A configuration that cannot be honoured: names the file and the key path."""


class ReleasedParameterError(ZeroEngineError):
    """A use of the values of a parameter whose unit is released on this rank."""


class DivergenceError(ZeroEngineError):
    """Ranks disagree, or one stalled or died: names the units and the ranks."""


class CheckpointError(ZeroEngineError):
    """A checkpoint that cannot be written, or that is absent, damaged, or another model's."""


class LaunchError(ZeroEngineError):
    """zero-launch was asked for something that it cannot start."""


class OffloadError(ZeroEngineError):
    """State that cannot be kept on, written to or read back from a disk: names the path, and what the system said.

    Attributes:
        errno: the system's number of what went wrong with a transfer, else 0.
    """

    errno = 0
