"""Configuration: `load` a file or dict into a checked, frozen `Config`, then `resolve` it for a world size."""

from zeroengine.config.loading import load
from zeroengine.config.model import BF16, FLOATS, FP16, Comm, Config, DataTypes, TorchAutocast, ZeroOptimization

__all__ = [
    "BF16",
    "FLOATS",
    "FP16",
    "Comm",
    "Config",
    "DataTypes",
    "TorchAutocast",
    "ZeroOptimization",
    "load",
]
