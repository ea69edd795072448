"""The engine of a model that is not trained."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import nn

from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import initialize

# The keys that matter to a model without an optimizer.
EVALUATION_KEYS = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "data_types", "keep_fp32_modules", "keep_dtype"),
    *("comm", "aio", "memory_check", "sequence_parallel_size", "gradient_accumulation_steps"),
)
# Those that name parts of the model that is trained.
KEYS_OF_TRAINED_MODEL = ("units", "tiling")


def make_evaluation_engine(model: nn.Module, config: Config, keys: Collection[str]) -> Engine:
    """Partition a model that is not trained, without gradients and master weights. A collective.

    Its parameters may be trainable, and stay so: a later optimizer chooses its parameters by this flag.

    Args:
        model: The model.
        config: The configuration before `resolve`. It has its overrides already.
        keys: Those of ``KEYS_OF_TRAINED_MODEL`` that hold for this model. A reference model may be of another class.
    """
    values = config.to_dict()
    values = {key: values[key] for key in (*EVALUATION_KEYS, *keys)}
    if trainable_parameters(model) and config.low_precision is not None:
        # The values must not be rounded.
        values["torch_autocast"] |= {"enabled": True, "dtype": config.precision}
        values["bf16"]["enabled"] = values["fp16"]["enabled"] = False
    with frozen(model):
        return initialize(model, None, Config.model_validate(values))


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
