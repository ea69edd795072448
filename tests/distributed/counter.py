"""An object of the user's with a state, for ``register_stateful``."""

from __future__ import annotations


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
