"""Replaces the parts of an engine that has ended, by ``close`` or ``release``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

from zeroengine.errors import ZeroEngineError

if TYPE_CHECKING:
    from zeroengine.engine.assembly import EngineParts


class EndedEngineError(ZeroEngineError, AttributeError):
    """An engine, or its optimizer, was used after its end. ``hasattr`` and ``getattr`` with a default work as ever."""


class EndedParts:
    """Takes the place of ``EngineParts``: counters keep their last values, and everything else raises.

    Args:
        call: The public call that ended the engine.
        parts: The parts of the engine. None of them is kept, so their memory is freed.
    """

    has_ended = True

    def __init__(self, call: str, parts: EngineParts) -> None:
        runner = parts.step_runner
        self._call = call
        self.accumulation = SimpleNamespace(micro_steps=parts.accumulation.micro_steps)
        self.scaler = SimpleNamespace(scale=parts.scaler.scale)
        self.step_runner = SimpleNamespace(
            await_result=lambda: None,
            num_updates=runner.num_updates,
            num_skipped=runner.num_skipped,
            grad_norm=runner.grad_norm,
            schedule=runner.schedule,
            gradient_clipping=runner.gradient_clipping,
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Raise EndedEngineError: only counters can be read."""
        # Python's own protocols, such as copy and pickle, look up such names and expect AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise EndedEngineError(
            f"this engine has ended, by engine.{self._call}. Its model is an ordinary one now: use engine.module, or "
            "pass that to zeroengine.initialize() for a new engine."
        )
