"""Fill in and check a configuration against `TrainingArguments`."""

from __future__ import annotations

import re
from typing import Any

import torch

from zeroengine.config import Config, ConfigLike, load
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate.settings import fill_parallelism
from zeroengine.optim.lion import Lion

FRAMEWORK = "TrainingArguments"
# The optimizers of bitsandbytes and torchao that AdamW and Lion stand for here, with the bits of their moments.
OPTIMIZER_NAME = re.compile("(?:paged_)?(adamw|lion)(?:_bnb|_torch)?_(8|32)bit")


def load_settings(config: ConfigLike | None, args: Any) -> Config:
    """Load a configuration, fill in what it leaves to `TrainingArguments`, and check that the two agree.

    The parameters of a schedule that depend on the number of steps are filled in by `with_number_of_steps`.

    Args:
        config: As of `zeroengine.initialize`.
        args: The `TrainingArguments`.

    Raises:
        ZeroEngineError: The two contradict each other. The message says what to write.
    """
    check_arguments(args)
    settings = fill_parallelism(load(config, argument="zero_config"), getattr(args, "parallelism_config", None))
    name = OPTIMIZER_NAME.fullmatch(args.optim)
    moments = {"optimizer_state_dtype": "int8"} if name is not None and name[2] == "8" else {}
    return settings.fill_auto(
        {**_batch_sizes(settings, args), **_precision(settings, args), **_optimizer(args), **moments}
        | {"gradient_clipping": args.max_grad_norm, "scheduler.params.warmup_max_lr": args.learning_rate},
        framework=FRAMEWORK,
    )


def with_number_of_steps(settings: Config, args: Any, num_steps: int) -> Config:
    """Return `settings` with the parameters of its schedule that depend on the number of updates, if it has one."""
    steps = {
        "scheduler.params.warmup_num_steps": args.get_warmup_steps(num_steps),
        "scheduler.params.total_num_steps": num_steps,
    }
    # A schedule may end at another step than the run, so a number in the file stays.
    return settings.fill_auto(steps, framework=FRAMEWORK, must_match=False)


def with_accumulation_of_trainer(settings: Config, args: Any) -> Config:
    """Return `settings` in which the trainer decides which backward is the last one of a step.

    The last step of an epoch may have fewer micro-steps than the others, and the trainer divides the loss itself. With
    one micro-step a step nothing changes: a count of 1 lets gradients keep the compute dtype.
    """
    if args.gradient_accumulation_steps == 1 and not settings.manual_accumulation:
        return settings
    return settings.with_manual_accumulation()


def check_arguments(args: Any) -> None:
    """Check that `TrainingArguments` ask for no other way to distribute the model.

    Raises:
        ZeroEngineError: They do.
    """
    for name, present in (("deepspeed", args.deepspeed), ("fsdp", args.fsdp)):
        if present:
            raise ZeroEngineError(
                f"TrainingArguments has {name}={present!r}, and the model would be distributed twice: leave {name} "
                "out. The configuration of the engine is passed to the trainer, as zero_config=..."
            )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise ZeroEngineError(
                f"TrainingArguments has {name}=True, which casts the model after it was partitioned. Leave it out: the "
                'model is evaluated in the precision that it is trained in, such as "bf16": {"enabled": true} in the '
                "configuration."
            )
    if args.n_gpu > 1:
        raise ZeroEngineError(
            f"one process sees {args.n_gpu} GPUs, and the trainer would copy the model to each. Start one process per "
            f"GPU: zero-launch --nproc-per-node {args.n_gpu} script.py"
        )


def own_optimizer(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the class and arguments that stand for an optimizer of another library; None for all other ones.

    The dtype of its moments is a key of the configuration.
    """
    if (name := OPTIMIZER_NAME.fullmatch(args.optim)) is None:
        return None
    shared = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    return (Lion, shared) if name[1] == "lion" else (torch.optim.AdamW, shared | {"eps": args.adam_epsilon})


def _batch_sizes(settings: Config, args: Any) -> dict[str, Any]:
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if settings.manual_accumulation:
        # The trainer decides in any case which backward ends a step.
        return {"train_micro_batch_size_per_gpu": micro}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * args.world_size // settings.ranks_per_sample,
    }


def _precision(settings: Config, args: Any) -> dict[str, Any]:
    """Return the values of the precision; none where the model's dtype decides.

    Raises:
        ZeroEngineError: The configuration has torch_autocast, and `args` name another dtype.
    """
    chosen = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    autocast = settings.torch_autocast
    if autocast.enabled:
        dtype = autocast.dtype
        if chosen != dtype:
            raise ZeroEngineError(
                f"torch_autocast is enabled with {dtype}, and TrainingArguments has bf16={args.bf16} and "
                f"fp16={args.fp16}. Write TrainingArguments({dtype}=True), or "
                '"torch_autocast": {"enabled": false} in the configuration.'
            )
        return {}
    values: dict[str, Any] = {}
    for name, wanted in (("bf16", args.bf16), ("fp16", args.fp16)):
        # False in the arguments is their default, so it does not decide against the dtype of the model.
        if wanted or getattr(settings, name).enabled:
            values[f"{name}.enabled"] = wanted
    return values


def _optimizer(args: Any) -> dict[str, Any]:
    """Return the parameters of an optimizer. They are left out where the file names none."""
    return {
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.weight_decay": args.weight_decay,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
    }
