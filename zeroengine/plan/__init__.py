"""What a training run will take: bytes by state, activations, and the seconds of a step, before anything is allocated.

``zeroengine.plan(...)`` is ``api.plan``: the package can be called. ``python -m zeroengine.plan.measure`` measures the
rates of a machine. The folders, each of which imports those above it alone:

- ``trace``: what a micro-step computes and holds, of a model that has no memory. ``zeroengine.memory`` has the bytes of
  the states.
- ``seconds``: what a step takes, by the rates of a machine.
- ``search``: what is compared, what ``initialize`` chooses, and what fits.
- ``report``: the plan as Python, as JSON and as a table.
"""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """Let ``zeroengine.plan`` be a function and a package."""

    # Python sets the attribute `plan` of `zeroengine` to this package when the first of its modules is imported, so a
    # function of that name would be lost.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``zeroengine.plan.api.plan``."""
        from zeroengine.plan.api import plan

        return plan(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """Return the signature of ``zeroengine.plan.api.plan``."""
        import inspect

        from zeroengine.plan.api import plan

        return inspect.signature(plan)


sys.modules[__name__].__class__ = CallablePackage
