"""The errors that users see. `assert` is only for mistakes of zeroengine itself."""

from __future__ import annotations


class ZeroEngineError(ValueError):
    """Base of every error raised for wrong input.

    The message says what was found, where, and what to write instead.
    """


class ConfigError(ZeroEngineError):
    """A configuration is wrong; the message names the file and the key path."""


class ReleasedParameterError(ZeroEngineError):
    """The values of a parameter are used while its unit is released on this rank."""


class DivergenceError(ZeroEngineError):
    """Ranks disagree, or a rank stalled or died; the message names the units and the ranks.

    Attributes:
        has_occurred: Whether there was one in this process, even if it was handled.
    """

    has_occurred = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        DivergenceError.has_occurred = True


class CheckpointError(ZeroEngineError):
    """A checkpoint cannot be written, or it is absent, damaged, or of another model."""


class LaunchError(ZeroEngineError):
    """zero-launch cannot start what its arguments ask for."""


class SkippedStepsError(ZeroEngineError):
    """Too many steps in a row were skipped (``skip_steps``)."""


class LossScaleError(ZeroEngineError, RuntimeError):
    """A backward has not the loss scale that fp16 needs.

    Errors of torch's backward are RuntimeErrors, so loops that catch those catch this one.
    """


class OffloadError(ZeroEngineError):
    """State cannot be kept on, written to or read from a disk; the message names the path and the system's error.

    Attributes:
        errno: The system's error number of a failed transfer, else 0.
    """

    errno = 0
