"""The first divergence of an engine's ranks."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from zeroengine.errors import DivergenceError
from zeroengine.utils.call_stack import public_call


class Divergence:
    """The first divergence of the ranks of one engine, whose groups, transport and watchdog share this object.

    [Note: After a divergence]
    Operations that some ranks have issued, and others have not, stay in the transport for ever. So whatever comes after
    the first error is refused at once, with that error and what to do. The other ranks may wait in an exchange of
    objects, or come to one: this rank takes part in it once, with its error in place of its object (``listeners``).
    Then every rank has taken part in equally many exchanges of the process group, which serves the next engine, too.

    Attributes:
        message: The message of the error; "" before it.
        num_forwards: How many forwards of the model, or of a part of it that is called by itself, this rank has begun
            outside of ``zeroengine.gathered``: those without gradients, if they gather anything, and those with
            gradients. Messages compare them.
        engine: A text that the ranks of an engine have in common, and no other engine has; "" before ``name_engine``.
        listeners: By the process group that they exchange over: called with the message.
    """

    def __init__(self) -> None:
        self.message = self.engine = ""
        self.num_forwards = [0, 0]
        self.listeners: dict[object, Callable[[str], None]] = {}

    def name_engine(self, engine: str) -> None:
        """Set ``engine``."""
        self.engine = engine
        of_engine[engine] = self

    def error(self, message: str, heard_over: object = None) -> DivergenceError:
        """Return the error of a divergence, after which ``check`` refuses everything.

        Args:
            message: What happened.
            heard_over: The process group whose exchange has ended with the error, so that its ranks know.
        """
        if not self.message:
            self.message = message
            for group, listener in self.listeners.items():
                if group is not heard_over:
                    listener(message)
        return DivergenceError(message)

    def check(self, what: str) -> None:
        """Refuse an operation after a divergence.

        Args:
            what: The operation, for people.

        Raises:
            DivergenceError: The ranks have diverged.
        """
        if self.message:
            raise DivergenceError(
                f"{public_call()} ({what}) is refused, because the ranks of this engine have diverged before. Call "
                "close() of this engine on every rank, make a new one, and load a checkpoint. The first error was: "
                f"{self.message}"
            )


# Those of this process's engines. A rank may hear of the divergence of one engine while it makes another one.
of_engine: WeakValueDictionary[str, Divergence] = WeakValueDictionary()
