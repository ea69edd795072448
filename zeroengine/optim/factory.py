"""Make the base optimizer that the caller or the configuration asks for, and check that it can be sharded."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.config.optimizers import EIGHT_BIT_TYPES
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import add_param_group, has_own_step_hooks
from zeroengine.optim.elementwise import check_looks_at_one_parameter
from zeroengine.optim.lion import Lion
from zeroengine.optim.mixed_optimizer import MixedOptimizer, members_of
from zeroengine.optim.muon_groups import build_muon
from zeroengine.partition.degrees import Degrees
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import STEP_PRE_HOOKS

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None


def make_optimizer(
    optimizer: OptimizerLike, model: nn.Module, config: Config, undo: ExitStack
) -> tuple[torch.optim.Optimizer, str | None]:
    """Return an optimizer whose groups hold the model's trainable parameters (frozen ones may be among them).

    Trainable parameters that the optimizer leaves out are frozen. A model without trainable parameters needs no
    optimizer: it gets one that updates nothing.

    Args:
        optimizer: An instance over the model's parameters, a callable that takes them, or None for
            ``config.optimizer``.
        model: The model.
        config: The resolved configuration.
        undo: Makes parameters that are frozen here trainable again.

    Returns:
        The optimizer, and a notice of the parameters that were frozen here.

    Raises:
        ZeroEngineError: There is no optimizer, or it has parameters of another model, or no trainable parameter.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    # torch's optimizers refuse an empty list. Frozen parameters get no gradients, so no update changes them.
    params = trainable or list(model.parameters())
    if isinstance(optimizer, (list, tuple)):
        optimizer = MixedOptimizer([unwrapped(member) for member in optimizer])
    if isinstance(optimizer, torch.optim.Optimizer):
        base_optimizer = unwrapped(optimizer)
    elif optimizer is not None:
        if not callable(optimizer):
            raise ZeroEngineError(
                f"optimizer is a torch.optim.Optimizer, a callable that takes parameters, or None; found {optimizer!r}"
            )
        base_optimizer = optimizer(params)
        if not isinstance(base_optimizer, torch.optim.Optimizer):
            raise ZeroEngineError(f"the optimizer callable returned {base_optimizer!r}, not a torch.optim.Optimizer")
    elif config.optimizer is not None:
        base_optimizer = build_configured(config.optimizer, model, params)
    elif not trainable:
        base_optimizer = build_optimizer("SGD", params, {"lr": 0.0})
    else:
        raise ZeroEngineError(
            "no optimizer: pass one to initialize(model, optimizer, config), or name one in the configuration, such as "
            '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}. A model that only runs forwards needs none: '
            "freeze it by model.requires_grad_(False)"
        )
    return base_optimizer, _freeze_left_out(base_optimizer, model, undo)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper, which forwards to it and updates nothing itself."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    base_optimizer: torch.optim.Optimizer = optimizer
    return base_optimizer


def build_configured(section: Any, model: nn.Module, params: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of a section of the configuration.

    Args:
        section: The section ``optimizer``.
        model: The model.
        params: The parameters to train, or groups of them.

    Raises:
        ZeroEngineError: It cannot be made.
    """
    if section.type == "Muon":
        return build_muon(model, params, section.params)
    return build_optimizer(section.type, params, dict(section.params))


def build_optimizer(kind: str, params: list[nn.Parameter], hyperparameters: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of a type of the configuration.

    Args:
        kind: The type: a name of ``torch.optim``, "Lion", one of ``EIGHT_BIT_TYPES``, or an import path.
        params: The parameters.
        hyperparameters: The keyword arguments of the class.

    Raises:
        ZeroEngineError: There is no such class, or it refuses the arguments.
    """
    kind = EIGHT_BIT_TYPES.get(kind, kind)
    # A name with a dot is an import path. Lion is not part of torch.
    cls = _imported(kind) if "." in kind else Lion if kind == "Lion" else getattr(torch.optim, kind)
    # See ``add_param_group``.
    is_decorated = cls.add_param_group is torch.optim.Optimizer.add_param_group
    undecorated = {"add_param_group": add_param_group} if is_decorated else {}
    _check_hyperparameters(kind, cls, hyperparameters)
    try:
        # A subclass carries the undecorated method, because torch's class must not change for other code. Whoever looks
        # at where the class comes from, such as ``is_elementwise``, sees the module of the original.
        members = {"__module__": cls.__module__, **undecorated}
        built: torch.optim.Optimizer = type(cls.__name__, (cls,), members)(params, **hyperparameters)
    except Exception as error:
        raise ZeroEngineError(
            f"optimizer.params: {kind} cannot be made with {hyperparameters}: {error}. It takes "
            f"{inspect.signature(cls)}."
        ) from error
    return built


def _check_hyperparameters(kind: str, cls: type, hyperparameters: Mapping[str, Any]) -> None:
    """Check values against the signature of ``cls``. torch compares a rate of True with 0, and takes it for 1.

    Raises:
        ZeroEngineError: A flag is no flag, or a number is no number.
    """
    signature = inspect.signature(cls)
    with contextlib.suppress(NameError, TypeError, SyntaxError):
        # The module of the class may postpone the evaluation of its annotations.
        signature = inspect.signature(cls, eval_str=True)
    for name, value in hyperparameters.items():
        parameter = signature.parameters.get(name)
        # A missing value stands for the class's own choice, and an unknown name is the class's to refuse.
        if parameter is None or value is None:
            continue
        annotation, default = parameter.annotation, parameter.default
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        kinds = {*typing.get_args(annotation), type(default)} if is_union else {annotation, type(default)}
        numbers = kinds & {int, float}
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_list = isinstance(value, (tuple, list)) and not any(isinstance(item, bool) for item in value)
        if type(value) in kinds or (numbers and is_number):
            continue
        if bool in kinds:
            wanted = "true or false"
        elif numbers:
            wanted = "a number"
        elif isinstance(default, (tuple, list)) and not (is_list and len(value) == len(default)):
            wanted = f"a list of {len(default)} values"
        else:
            continue
        raise ZeroEngineError(f"optimizer.params.{name} of {kind}: found {value!r}; write {wanted}")


def _imported(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    # An import runs the module, which may raise anything.
    except Exception as error:
        raise ZeroEngineError(
            f'optimizer.type "{path}" cannot be imported: {error}. Write the import path of an optimizer class, such '
            'as "torch.optim.RAdam", in a package that every rank can import.'
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ZeroEngineError(f'optimizer.type "{path}" is {cls!r}, not a subclass of torch.optim.Optimizer')
    return cls


def _freeze_left_out(optimizer: torch.optim.Optimizer, model: nn.Module, undo: ExitStack) -> str | None:
    """Check the optimizer's parameters, freeze the trainable ones that it leaves out, and return a notice of them."""
    # Parameters are compared by identity: an optimizer over a copy of the model would train nothing.
    names = {param: name for name, param in model.named_parameters()}
    kind = type(optimizer).__name__
    held: set[nn.Parameter] = set()
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ZeroEngineError(
                    f"{kind}: param_groups[{index}]['params'][{position}], of shape {tuple(param.shape)}, is not a "
                    "parameter of the model. Build the optimizer from model.parameters() of the model passed to "
                    "initialize(), after any change of its modules."
                )
            if param in held:
                raise ZeroEngineError(f"{kind}: {names[param]} is again in param_groups[{index}]; name it once")
            held.add(param)
    # The gradients of a trainable parameter that the optimizer lacks would be reduced for nothing.
    left_out = {param: name for param, name in names.items() if param.requires_grad and param not in held}
    if not left_out:
        return None
    shown = listed(list(left_out.values()), 3)
    if len(left_out) == sum(param.requires_grad for param in names):
        raise ZeroEngineError(
            f"{kind} has none of the trainable parameters ({shown}), so nothing would be trained. Build it from "
            "model.parameters(), or freeze the model with model.requires_grad_(False)."
        )
    for param in left_out:
        param.requires_grad_(False)
        undo.callback(param.requires_grad_)
    return (
        f"{kind} leaves out trainable parameters, which count as frozen: {shown}. They get no gradients, which "
        "grad_norm and clipping leave out, too. Add them to a group to train them, or freeze them with "
        "requires_grad_(False)."
    )


def check_optimizer(optimizer: torch.optim.Optimizer, degrees: Degrees) -> None:
    """Check that a sharded optimizer can update as ``optimizer`` does.

    Args:
        optimizer: The base optimizer.
        degrees: The degrees of the model's states; at optimizer degree 1 there are whole parameters.

    Raises:
        ZeroEngineError: The optimizer needs a closure, or several parameters at a time where there are shards, or
            holds another optimizer, or has taken steps.
    """
    if isinstance(optimizer, MixedOptimizer):
        for member in members_of(optimizer):
            if has_own_step_hooks(member):
                raise ZeroEngineError(
                    f"the {type(member).__name__} among several optimizers has step hooks, which the engine would not "
                    "call. Register them on a zeroengine.MixedOptimizer, pass that one, and call its step()."
                )
            check_optimizer(member, degrees)
        return
    name = type(optimizer).__name__
    # Optimizers such as Lookahead wrap another one, which would go on with the parameters that it knows.
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise ZeroEngineError(
                f"{name} updates through another optimizer, its attribute {attribute} ({type(value).__name__}), which "
                "would still have the whole parameters. Pass that one to initialize()."
            )
    if not hasattr(optimizer, STEP_PRE_HOOKS):
        raise ZeroEngineError(
            f"{name} does not call super().__init__() of torch.optim.Optimizer, and so has no step hooks, which the "
            "engine needs. Call it in the constructor."
        )
    # The names of the base classes count as well, so that a subclass of LBFGS is found.
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    needs_closure = any(arg.default is arg.empty and arg.kind is arg.POSITIONAL_OR_KEYWORD for arg in arguments)
    if needs_closure or "LBFGS" in names:
        raise ZeroEngineError(
            f"{name} calls the model in a step, through a closure, and engine.step() takes none. Use an optimizer such "
            "as AdamW."
        )
    libraries = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    # Optimizers of bitsandbytes in 32 bits have the same classes.
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 8)
    # Those of torchao are tensors of classes of its own, which no checkpoint holds.
    if ("torchao" in libraries or ("bitsandbytes" in libraries and degrees.optimizer > 1)) and bits == 8:
        kind = next((kind for kind in ("AdamW", "Adam", "Lion", "SGD", "Adagrad") if kind in name), "AdamW")
        # torchao's Adam has L2 decay, and that of a configuration decouples it unless it says otherwise.
        decay = ', "params": {"adam_w_mode": false}' if "torchao" in libraries and kind == "Adam" else ""
        raise ZeroEngineError(
            f"{name} quantizes its states in blocks of each rank's part, so that another number of ranks would be "
            f'another optimizer. Write "optimizer": {{"type": "{kind}"{decay}}} and "optimizer_state_dtype": "int8" in '
            f"the configuration, or pass torch's optimizer with the latter: blocks are then counted in each parameter."
        )
    if "SparseAdam" in names:
        raise ZeroEngineError(
            f"{name} takes sparse gradients alone, and the engine reduces dense ones, also of "
            "nn.Embedding(sparse=True). Use an optimizer such as AdamW."
        )
    if not all(_is_initial(state) for state in optimizer.state.values()):
        raise ZeroEngineError(
            f"the {name} passed to initialize() has already taken steps, or makes copies of parameters in its "
            "constructor: its state cannot be partitioned. Call initialize() before training, and make such state in "
            "the first step."
        )
    if degrees.optimizer > 1:
        check_looks_at_one_parameter(optimizer)


def _is_initial(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state is one that constructors make: with a step count of 0, or of constants."""
    if "step" in state:
        return float(state["step"]) == 0
    # A meta tensor has no values, see ``check_optimizer_state`` of ``deferred_init``.
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor) and value.numel())
    return all(value.is_meta or bool((value == value.flatten()[0]).all()) for value in tensors)
