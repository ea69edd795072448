"""The engine of a model that is not trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from zeroengine.config import Config, load
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import initialize

# The keys that matter to a model without an optimizer.
EVALUATION_KEYS = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "data_types", "keep_fp32_modules", "keep_dtype"),
    *("comm", "aio", "memory_check", "sequence_parallel_size", "gradient_accumulation_steps"),
)
# Those that name parts of the model that is trained. A reference model may be of another class.
KEYS_OF_TRAINED_MODEL = ("units", "tiling")


def make_evaluation_engine(model: nn.Module, config: Config) -> Engine:
    """Partition a model that is not trained, without gradients and master weights. A collective.

    Its parameters may be trainable, and stay so: a later optimizer chooses its parameters by this flag.

    Args:
        model: The model.
        config: The configuration before `resolve`.
    """
    is_trainable = bool(trainable_parameters(model))
    values = config.to_dict()
    values = {key: values[key] for key in EVALUATION_KEYS + (KEYS_OF_TRAINED_MODEL if is_trainable else ())}
    if is_trainable and config.low_precision is not None:
        # The values must not be rounded.
        values["torch_autocast"] |= {"enabled": True, "dtype": config.precision}
        values["bf16"]["enabled"] = values["fp16"]["enabled"] = False
    with frozen(model):
        return initialize(model, None, load(values))


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that require a gradient."""
    return [param for param in model.parameters() if param.requires_grad]


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters of a model inside the block."""
    trainable = trainable_parameters(model)
    for param in trainable:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trainable:
            param.requires_grad_(True)
