"""accelerate: `ZeroAccelerator`, an `Accelerator` that trains on zeroengine.

- `accelerator.py`: the class.
- `checks.py`: what it refuses.
- `settings.py`: the arguments of `Accelerator` and its environment variables, against the configuration.
- `wrappers.py`: the optimizer and the schedule that `prepare` returns.
- `engines.py`: the engines that `prepare` makes, and which model an optimizer belongs to.
- `sample_groups.py`: ranks that share samples.
- `states.py`: what `save_state` writes and `load_state` reads.
"""

from zeroengine.integrations.versions import require_versions

# A version that is too old would fail below with an error that does not say so.
require_versions("accelerate", "accelerate")

from zeroengine.integrations.accelerate.accelerator import ZeroAccelerator  # noqa: E402

__all__ = ["ZeroAccelerator"]
