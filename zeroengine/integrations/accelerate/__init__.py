"""accelerate: `ZeroAccelerator`, an `Accelerator` that trains on zeroengine.

- `accelerator.py`: the class.
- `settings.py`: the arguments of `Accelerator` and its environment variables, against the configuration.
- `wrappers.py`: the optimizer and the schedule that `prepare` returns.
- `engines.py`: the engines that `prepare` makes.
- `pairing.py`: which model an optimizer belongs to.
- `states.py`: what `save_state` writes and `load_state` reads.
- `versions.py`: the oldest version of accelerate that works.
"""

from zeroengine.integrations.accelerate.versions import check_version

# A version that is too old would fail below with an error that does not say so.
check_version()

from zeroengine.integrations.accelerate.accelerator import ZeroAccelerator  # noqa: E402

__all__ = ["ZeroAccelerator"]
