"""What a training run will take: bytes by state, activations, and the seconds of a step, before anything is allocated.

``zeroengine.plan(...)`` is ``api.plan``: the package can be called.

- ``api``: the plan of a model on a machine.
- ``state_bytes``: the bytes that a rank holds of every state, by the engine's own layout arithmetic.
- ``automatic``: the stage and the offload that ``initialize`` chooses, and what it refuses.
- ``model_facts``: a model on the meta device, from a function, a configuration of Hugging Face, or plain numbers.
- ``standard_decoder``: the model of plain numbers.
- ``activations``: memory and arithmetic of one micro-step, traced under fake tensors. It uses ``operation_trace``, and
  ``repeated_blocks`` to trace equal blocks once.
- ``machine``: the memory and the rates of the machines; ``machine_presets`` has those of common GPUs, and
  ``known_machines`` finds one by name.
- ``measure``: the rates of this machine, measured. ``compute_rates`` fits those of a model's operations.
- ``step_time``: the seconds of a step.
- ``candidates``, ``estimator``, ``scaling``: what is compared, and what fits.
- ``result``, ``report``, ``report_page``: the plan as Python, as JSON, as a table and as a page.
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
