"""DeepSpeed's names over zeroengine: ``import zeroengine.integrations.deepspeed as deepspeed`` serves its scripts.

- ``initialize``: ``deepspeed.initialize``. ``settings``: its configuration. ``engine``, ``optimizer``: what it returns.
- ``zero``, ``comm``, ``ops``, ``checkpointing``, ``utils``, ``accelerator``: DeepSpeed's modules of these names.
- ``module_paths``: DeepSpeed's other modules, each a row of a table.
"""

from __future__ import annotations

from typing import Any

from zeroengine.integrations.deepspeed import accelerator as accelerator
from zeroengine.integrations.deepspeed import checkpointing as checkpointing
from zeroengine.integrations.deepspeed import comm as comm
from zeroengine.integrations.deepspeed import ops as ops
from zeroengine.integrations.deepspeed import unavailable
from zeroengine.integrations.deepspeed import zero as zero
from zeroengine.integrations.deepspeed.accelerator import get_accelerator
from zeroengine.integrations.deepspeed.comm import init_distributed
from zeroengine.integrations.deepspeed.engine import DeepSpeedEngine
from zeroengine.integrations.deepspeed.initialize import add_config_arguments, initialize
from zeroengine.integrations.deepspeed.module_paths import install_modules
from zeroengine.integrations.deepspeed.optimizer import DeepSpeedOptimizer
from zeroengine.integrations.deepspeed.script_utils import OnDevice, log_dist, logger
from zeroengine.integrations.deepspeed.settings import DeepSpeedConfig, DeepSpeedConfigError

# The version of DeepSpeed whose names these are.
__version__ = version = "0.19.8"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None
dist = comm

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in unavailable.NAMES:
        return unavailable.NAMES[name]
    raise AttributeError(f"deepspeed.{name} is not served by zeroengine; docs/integrations/deepspeed.md lists what is")


install_modules()
