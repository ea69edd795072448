"""``deepspeed.initialize`` and ``add_config_arguments``."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import initialize as initialize_engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed import comm
from zeroengine.integrations.deepspeed.engine import DeepSpeedEngine
from zeroengine.integrations.deepspeed.leaf_modules import mark_leaf_modules
from zeroengine.integrations.deepspeed.lr_schedules import SCHEDULES
from zeroengine.integrations.deepspeed.muon import MuonWithAuxAdam
from zeroengine.integrations.deepspeed.ops import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from zeroengine.integrations.deepspeed.optimizer import make_optimizer_view
from zeroengine.integrations.deepspeed.script_utils import log_dist
from zeroengine.integrations.deepspeed.settings import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    ZeRORuntimeException,
    has_bf16_states,
    load_settings,
    read_settings,
)
from zeroengine.integrations.deepspeed.ulysses_sp import UlyssesSPAttentionHF
from zeroengine.integrations.deepspeed.zero_init import outside_of_init
from zeroengine.integrations.evaluation import frozen
from zeroengine.integrations.parameter_engines import engines_of
from zeroengine.optim.factory import build_configured

# What "zero_force_ds_cpu_optimizer" allows.
CPU_OPTIMIZERS = (DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion)
# What "zero_allow_untested_optimizer": false allows.
TESTED_OPTIMIZERS = (*CPU_OPTIMIZERS, FusedAdam, FusedLion, MuonWithAuxAdam, torch.optim.Adam, torch.optim.AdamW)

log = logging.getLogger("zeroengine")


@outside_of_init()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Partition a model and its optimizer over all ranks.

    Args:
        args: An object whose attribute ``deepspeed_config`` names the configuration, where ``config`` does not.
        model: The model.
        optimizer: A torch optimizer over its parameters, or a callable that takes them; None for the configuration's.
        model_parameters: The parameters, or groups of them, that the configuration's optimizer trains. None: all.
        training_data: A data set, whose loader is the third result.
        lr_scheduler: A schedule over the optimizer, or a callable that takes it; None for the configuration's.
        distributed_port: The port of rank 0, where the launcher set none.
        mpu: The ranks that hold one model together, as of ``zeroengine.initialize``; or those that share each sample,
            which ``UlyssesSPAttentionHF.register_with_transformers`` returns.
        dist_init_required: As of ``init_distributed``.
        collate_fn: As of ``torch.utils.data.DataLoader``, for ``training_data``.
        config: A dict, or the name of a JSON file.
        mesh_param: Must be None.
        config_params: The same as ``config``.

    Returns:
        The engine, its optimizer (None without one), the loader of ``training_data`` (or None), and the LR schedule
        (or None).

    Raises:
        ZeroEngineError: The input is wrong. The message says what to write instead.
    """
    if model is None:
        # DeepSpeed asserts this, and scripts catch its class of error.
        raise AssertionError("deepspeed.initialize() needs the model: write initialize(model=model, config=...)")
    if mesh_param is not None:
        raise ZeroEngineError('initialize() takes no mesh_param: write "sequence_parallel_size" in the configuration')
    ulysses, unit = (mpu, None) if isinstance(mpu, UlyssesSPAttentionHF) else (None, mpu)
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    # Frameworks and their tests look for this line to see that DeepSpeed runs.
    log_dist("DeepSpeed info: zeroengine runs this model under DeepSpeed's names", ranks=[0])
    settings = _find_settings(args, config, config_params)
    settings = settings if ulysses is None else read_settings(settings) | {"sequence_parallel_size": ulysses.size}
    facts = DeepSpeedConfig(settings, unit)
    loaded = load_settings(settings, warns=True)
    _check_unmanaged(facts)
    if isinstance(optimizer, torch.optim.Optimizer):
        facts.optimizer_name = type(optimizer).__name__
        _check_optimizer(facts, optimizer)
        names_dtype = loaded.optimizer_state_dtype is not None
        if getattr(optimizer, "fp32_optimizer_states", True) is False and not names_dtype:
            loaded = loaded.model_copy(update={"optimizer_state_dtype": "bf16"})
    mark_leaf_modules(model, facts.leaf_module)
    for section in (loaded.zero_optimization.offload_optimizer, loaded.zero_optimization.offload_param):
        if section.disk is not None:
            # DeepSpeed makes the folders for states on NVMe as well.
            Path(section.disk).mkdir(parents=True, exist_ok=True)
    _close_earlier_engine(model)
    for name, passed in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        if passed is not None and (section := getattr(loaded, name)) is not None:
            notice = f'the {name} that is passed to initialize() is used, and not "{section.type}" of the configuration'
            log_dist(notice, ranks=[0], level=logging.WARNING)
    schedule = _schedule_of(loaded) if lr_scheduler is None else lr_scheduler
    loaded = loaded.model_copy(update={"scheduler": None}) if loaded.scheduler is not None else loaded
    undo = contextlib.ExitStack()
    trains, made = _optimizer_of(model, optimizer, model_parameters, loaded, undo)
    try:
        engine = initialize_engine(model, made, loaded, lr_scheduler=schedule, mpu=unit)
    except BaseException:
        undo.close()
        raise
    engine.call_at_end(undo.pop_all().close)
    # A script that registers the model takes the mean over the parts of a sample itself.
    engine.sequence_group.averages_losses = ulysses is None
    try:
        # The ranks end the engine together, for that exchanges values.
        with engine.group.collective_errors("to initialize"):
            served = _serve(engine, facts, trains, training_data, collate_fn)
    except Exception:
        # The caller has no handle on the engine. This makes the model ordinary again, with whole values.
        engine.release()
        raise
    served.mpu = mpu or served.mpu
    return served, served.optimizer, served.training_dataloader, served.lr_scheduler


def _serve(
    engine: Engine, facts: DeepSpeedConfig, trains: bool, training_data: Any, collate_fn: Any
) -> DeepSpeedEngine:
    """Return the engine under DeepSpeed's names."""
    # DeepSpeed casts the model first, so the run of a script begins with the same numbers here.
    engine.round_masters()
    view = make_optimizer_view(engine) if trains else None
    return DeepSpeedEngine(engine, view, facts, training_data, collate_fn)


def _find_settings(args: Any, config: Any, config_params: Any) -> Any:
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = config if config is not None else config_params
    if given is None and named is None:
        raise DeepSpeedConfigError(
            "no configuration was given: write initialize(config=...) with a dict or the name of a JSON file, or pass "
            "args with the attribute deepspeed_config"
        )
    # DeepSpeed refuses two configurations, one of which would be ignored.
    assert given is None or named is None, (
        "two configurations were given, config= and args.deepspeed_config; keep one of them"
    )
    return given if given is not None else named


def _check_unmanaged(facts: DeepSpeedConfig) -> None:
    """Refuse what DeepSpeed refuses where every ``step`` updates; scripts catch its class of error."""
    zero = facts._param_dict.get("zero_optimization") or {}
    assert facts.managed_gradient_accumulation or facts.zero_optimization_stage >= 2 or not zero.get("overlap_comm"), (
        '"managed_gradient_accumulation": false supports ZeRO overlap_comm only with ZeRO stage 2 or 3; remove '
        '"overlap_comm": true'
    )


def _check_optimizer(facts: DeepSpeedConfig, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that the configuration rules out by a key that it names.

    Without the keys ``"zero_force_ds_cpu_optimizer": true`` and ``"zero_allow_untested_optimizer": false`` every
    optimizer works that ``zeroengine.initialize`` takes, where DeepSpeed refuses some.
    """
    offloads = facts.zero_config.offload_optimizer.device != "none"
    forced = facts.zero_force_ds_cpu_optimizer is True and offloads
    if forced and not isinstance(optimizer, CPU_OPTIMIZERS):
        raise ZeRORuntimeException(
            '"zero_force_ds_cpu_optimizer": true with offload_optimizer allows only the CPU optimizers of DeepSpeed, '
            f"found {type(optimizer).__name__}. Pass deepspeed.ops.adam.DeepSpeedCPUAdam, or write false: the update "
            "runs on the CPU either way"
        )
    # DeepSpeed asserts the following, and scripts catch its class of error.
    in_fp32 = offloads and getattr(optimizer, "fp32_optimizer_states", False)
    assert not (in_fp32 and has_bf16_states(facts._param_dict)), (
        '"bf16_optimizer_states": true with DeepSpeedCPUAdam, which asks for states in fp32: write '
        "DeepSpeedCPUAdam(..., fp32_optimizer_states=False), or remove the key"
    )
    refuses_untested = facts._param_dict.get("zero_allow_untested_optimizer") is False and facts.zero_enabled
    assert not refuses_untested or type(optimizer) in TESTED_OPTIMIZERS, (
        f'"zero_allow_untested_optimizer": false refuses {type(optimizer).__name__}, which DeepSpeed did not test with '
        "ZeRO. Write true: every optimizer that looks at one parameter at a time works here"
    )


def _close_earlier_engine(model: nn.Module) -> None:
    """End the engine that already trains the model, as DeepSpeed's scripts initialize a model again."""
    for engine in engines_of(model.parameters()):
        log.warning("the model is initialized again: its engine ends, and its optimizer state is dropped")
        engine.close()


def _schedule_of(config: Config) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Return a callable that makes the schedule of the configuration."""
    if config.scheduler is None:
        return None
    kind, params = SCHEDULES[config.scheduler.type], dict(config.scheduler.params)
    # Frameworks of 2025 write 0 for "auto" where there is no warm-up, which DeepSpeed took for 2 until 0.19.6.
    if params.get("warmup_num_steps") == 0:
        params["warmup_num_steps"] = 2
    return lambda optimizer: kind(optimizer, **params)


def _optimizer_of(
    model: nn.Module, optimizer: Any, model_parameters: Any, config: Config, undo: contextlib.ExitStack
) -> tuple[bool, Any]:
    """Return whether the model is trained, and the optimizer for zeroengine's ``initialize``."""
    groups = _groups(model_parameters, model)
    if optimizer is not None:
        if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
            return True, optimizer
        return True, lambda params: optimizer(groups if groups is not None else params)
    if config.optimizer is not None:
        section = config.optimizer
        return True, lambda params: _configured_optimizer(section, model, groups or params)
    # A model that is only evaluated: frozen parameters need neither gradients nor master weights.
    undo.enter_context(frozen(model))
    return False, None


def _configured_optimizer(section: Any, model: nn.Module, params: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the configuration; for Adam of the class that DeepSpeed makes."""
    # The configuration's Adam is one with L2 decay; where its decay is decoupled, it is AdamW already.
    if section.type in ("Adam", "AdamW"):
        names = ("lr", "betas", "eps", "weight_decay")
        return FusedAdam(params, adam_w_mode=section.type == "AdamW", **{name: section.params[name] for name in names})
    return build_configured(section, model, params)


def _groups(model_parameters: Any, model: nn.Module) -> Any:
    """Return ``model_parameters`` as a list for an optimizer; None where it says nothing."""
    if model_parameters is None:
        return None
    if isinstance(model_parameters, nn.Module):
        model_parameters = model_parameters.parameters()
    if isinstance(model_parameters, dict):
        model_parameters = [model_parameters]
    if not isinstance(model_parameters, Iterable):
        raise ZeroEngineError(f"model_parameters is a list of parameters or groups, found {model_parameters!r:.100}")
    groups = list(model_parameters)
    if groups and isinstance(groups[0], dict):
        for number, group in enumerate(groups):
            params = group["params"]
            groups[number] = {**group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}
        return [group for group in groups if group["params"]]
    # Scripts pass model.parameters(), frozen ones included.
    return [param for param in groups if param.requires_grad] or groups or None


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration, which zeroengine reads")
    group.add_argument("--deepspeed", action="store_true", help="use the configuration; for the script to read")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser
