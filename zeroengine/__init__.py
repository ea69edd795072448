"""zeroengine: train PyTorch models partitioned over data-parallel ranks (ZeRO stages 0 to 3)."""

from .engine import Engine, initialize
from .errors import ConfigError, DivergenceError, ReleasedParameterError, ZeroEngineError
from .memory import Memory
from .runtime import gathered

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DivergenceError",
    "Engine",
    "Memory",
    "ReleasedParameterError",
    "ZeroEngineError",
    "gathered",
    "initialize",
]
