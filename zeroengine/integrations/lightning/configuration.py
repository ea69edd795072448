"""The configuration of a run under Lightning: its stage, its precision, and who counts micro-steps."""

from __future__ import annotations

import os
from typing import Any

from zeroengine.config import Config, ConfigLike, load
from zeroengine.config.loading import CONFIG_VARIABLE, OVERRIDES_VARIABLE
from zeroengine.errors import ZeroEngineError

# What Lightning calls a precision, and the section of the configuration with the same numbers.
SECTIONS = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
# Lightning's default, which it also reports where the user wrote no precision.
DEFAULT_PRECISION = "32-true"


def load_settings(config: ConfigLike | None, stage: int | None) -> Config:
    """Load the configuration of a strategy.

    Args:
        config: What ``zeroengine.initialize`` takes. None: the file of zero-launch, or the defaults if there is none.
        stage: The stage in the strategy's name, such as 3 in "zeroengine_stage_3". None: the configuration has it.

    Raises:
        ZeroEngineError: The configuration is wrong, or has another stage than the strategy's name.
    """
    if config is None and not (os.environ.get(CONFIG_VARIABLE) or os.environ.get(OVERRIDES_VARIABLE)):
        # Without a configuration, Lightning's own precision decides.
        precision = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
        return load({**precision, "zero_optimization": {"stage": stage or 0}})
    settings = load(config)
    found = settings.zero_optimization.stage
    if stage is not None and found != stage:
        raise ZeroEngineError(
            f'strategy="zeroengine_stage_{stage}", and zero_optimization.stage is {found!r} in the configuration. '
            f'Write strategy="zeroengine", and the configuration decides; or "zero_optimization": {{"stage": {stage}}}.'
        )
    return settings


def check_no_arguments_of_ddp(strategy: Any) -> None:
    """Check that a strategy got no arguments for DistributedDataParallel.

    Raises:
        ZeroEngineError: It did.
    """
    if strategy._ddp_kwargs:
        raise ZeroEngineError(
            f"{type(strategy).__name__}(): {', '.join(strategy._ddp_kwargs)}: these are arguments of "
            "DistributedDataParallel, which is not used here. Leave them out; what the engine does is in the "
            "configuration."
        )


def with_precision(settings: Config, precision: str, framework: str) -> Config:
    """Check Lightning's precision against the configuration, and fill in what the configuration leaves to it.

    Args:
        settings: The configuration, not resolved.
        precision: Lightning's name of the precision, such as "bf16-mixed".
        framework: "Trainer" or "Fabric", for the message.

    Raises:
        ZeroEngineError: Lightning was told another precision than the configuration has.
    """
    if precision == DEFAULT_PRECISION:
        return settings
    section = SECTIONS.get(precision)
    if section is None:
        raise ZeroEngineError(
            f'{framework}(precision="{precision}"): zeroengine trains in fp32, bf16 or fp16, or in the dtype of the '
            'model\'s own parameters. Leave precision= out, and write such as "bf16": {"enabled": true} in the '
            "configuration."
        )
    autocast = settings.torch_autocast
    if autocast.enabled and autocast.dtype == section and precision.endswith("mixed"):
        return settings
    enabled = getattr(settings, section).enabled
    if enabled is None and not autocast.enabled:
        return settings.fill_auto({f"{section}.enabled": True}, framework=framework)
    if enabled:
        return settings
    names = [name for name in ("bf16", "fp16", "torch_autocast") if getattr(settings, name).enabled]
    raise ZeroEngineError(
        f'{framework}(precision="{precision}"), and the configuration has '
        + (f'"{names[0]}": {{"enabled": true}}' if names else "no precision, which means that of the parameters")
        + f'. Leave precision= out, and the configuration decides; or write "{section}": {{"enabled": true}} there.'
    )


def precision_of(settings: Config) -> str:
    """Return Lightning's name of the precision that the configuration has."""
    return {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": DEFAULT_PRECISION}[settings.precision]


def with_accumulation_of_loop(settings: Config, steps: int, world_size: int, framework: str) -> Config:
    """Let Lightning end the steps: the engine sums the gradients of as many backwards as there are.

    Args:
        settings: The configuration, not resolved.
        steps: The number of backwards in a full step, by which Lightning or the loop divides the loss.
        world_size: The number of ranks.
        framework: What the message calls the source of ``steps``, with the argument.

    Raises:
        ZeroEngineError: The configuration has another number of micro-steps, or its batch sizes contradict it.
    """
    found = settings.gradient_accumulation_steps
    if found not in (None, "manual", steps):
        raise ZeroEngineError(
            f"gradient_accumulation_steps is {found} in the configuration, and {framework}. Leave the key out of the "
            'configuration or write "manual": the loop decides when a step ends, and divides the loss.'
        )
    if found != "manual":
        # This compares the batch sizes in the configuration with one another.
        settings.model_copy(update={"gradient_accumulation_steps": steps}).resolve(world_size=world_size)
    return settings.with_manual_accumulation()
