"""Frozen quantized parameters of bitsandbytes and torchao, split into the tensors that hold their values.

[Note: Quantized parameters]
A quantized weight is packed values together with scales and tables, which the libraries keep in attributes. Each of
these tensors becomes an ``nn.Parameter`` in the same attribute (a *storage*), which a unit partitions, gathers and
releases as any frozen parameter, byte for byte. Their names are those that the libraries give them in state dicts.

    library        parameter     packed values             scales and tables
    bitsandbytes   Params4bit    the parameter's data      quant_state: absmax, code, offset; state2: absmax, code
    bitsandbytes   Int8Params    the parameter's data, CB  SCB
    torchao        any wrapper   what ``__tensor_flatten__`` names; the parameter has no memory of its own

Nothing else in the engine knows these libraries, and none of them is imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.partition.storages import STORAGES_ATTRIBUTE, WRAPPER_ATTRIBUTE, is_quantized, storages_of
from zeroengine.runtime.released_parameter import class_of, has_no_values
from zeroengine.utils.torch_internals import is_traceable_wrapper_subclass, make_subclass, parameters_of

# A storage: what follows the parameter's name, and the objects and attributes that refer to the tensor.
_Place = tuple[str, list[tuple[Any, str]]]
# What holds a tensor only from a forward to the next one.
_TEMPORARY = {"idx", "subB"}
# The attribute of the state of a Linear8bitLt that is the weight, whose data counts as ``CB``.
_WEIGHT = "_zeroengine_weight"
# The attribute of a Linear4bit that lets evaluations on the CPU pack the weight anew, in another shape.
_REPACKS = "support_avx512bf16_for_cpu"


def library_of(tensor: torch.Tensor) -> str:
    """Return the library whose quantized weights ``tensor`` may be one of; "" if there is none."""
    kinds = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(tensor).__mro__}
    if is_traceable_wrapper_subclass(tensor):
        return "torchao" if any(library == "torchao" for library, _ in kinds) else ""
    is_8bit = ("bitsandbytes", "Int8Params") in kinds and not getattr(tensor, "has_fp16_weights", False)
    return "bitsandbytes" if is_8bit or ("bitsandbytes", "Params4bit") in kinds else ""


def shared_by_copies(model: nn.Module) -> list[object]:
    """Return the objects of quantized parameters that a copy of ``model`` may share, to be replaced afterwards."""
    params = [param for param in model.parameters() if library_of(param)]
    states = [getattr(module, key, None) for module in model.modules() for key in ("quant_state", "state")]
    return [*params, *(state for state in states if state is not None)] if params else []


def split_quantized_parameters(model: nn.Module, undo: ExitStack | None = None) -> None:
    """Make each tensor of the quantized parameters of ``model`` an ``nn.Parameter``, with the same memory.

    Args:
        model: The model.
        undo: Makes plain tensors of them again.

    Raises:
        ZeroEngineError: A quantized parameter is trainable, has no quantized values yet, or keeps its values in other
            attributes than this module knows. Nothing has changed.
    """
    places_of_param: dict[nn.Parameter, tuple[nn.Module, list[_Place]]] = {}
    for prefix, module in model.named_modules():
        for key, param in parameters_of(module).items():
            if param is not None and param not in places_of_param and not is_quantized(param) and library_of(param):
                places_of_param[param] = module, _places_of(plain_name(f"{prefix}.{key}".lstrip(".")), module, param)
    for param, (module, places) in places_of_param.items():
        _split(module, param, places, undo or ExitStack())
    for module in model.modules():
        if getattr(module, _REPACKS, False):
            setattr(module, _REPACKS, False)
            if undo is not None:
                undo.callback(setattr, module, _REPACKS, True)


def quantize_on_meta(model: nn.Module) -> None:
    """Give parameters without values, which bitsandbytes has not quantized yet, the shapes of quantized ones."""
    for param in model.parameters():
        if library_of(param) == "bitsandbytes" and not _has_quantized_values(param):
            param._quantize("meta")  # type: ignore[attr-defined]


def replace_quantized_parameters(model: nn.Module, new_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the quantized parameters of ``model`` by others. The replaced ones, and their tensors, stay as they are.

    Args:
        model: The model.
        new_of: Returns what takes the place of a tensor, without values.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, param in parameters_of(module).items():
            if param is None or not library_of(param):
                continue
            if param not in replaced:
                replaced[param] = _replaced(module, param, new_of)
            parameters_of(module)[key] = replaced[param]


def _replaced(module: Any, param: nn.Parameter, new_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if is_traceable_wrapper_subclass(param):
        return map_wrapper(param, new_of)
    # Torch 2.11 makes a fake tensor of no subclass.
    data = new_of(param.as_subclass(torch.Tensor))
    # A fake tensor keeps its class, which computes shapes.
    is_plain = type(data) is torch.Tensor
    new: Any = make_subclass(type(param), data) if is_plain else nn.Parameter(data, False)
    new.__dict__.update(param.__dict__)
    new.__dict__.pop(STORAGES_ATTRIBUTE, None)
    if "quant_state" in new.__dict__:
        new.module, new.quant_state = module, copy.copy(new.quant_state)
        new.quant_state.state2 = copy.copy(new.quant_state.state2)
        module.quant_state = new.quant_state
    else:
        new.CB = None
        if hasattr(module, "state"):
            module.state = copy.copy(module.state)
            module.state.__dict__[_WEIGHT if _WEIGHT in module.state.__dict__ else "CB"] = new
    for _, attributes in _places_of("", module, new):
        tensor = new_of(getattr(*attributes[0]))
        for holder, attribute in attributes:
            setattr(holder, attribute, tensor)
    return new


def _split(module: Any, param: nn.Parameter, places: list[_Place], undo: ExitStack) -> None:
    is_wrapper = is_traceable_wrapper_subclass(param)
    storages = [] if is_wrapper else [("", param)]
    for suffix, attributes in places:
        storage = nn.Parameter(getattr(*attributes[0]), requires_grad=False)
        if is_wrapper:
            storage.__dict__[WRAPPER_ATTRIBUTE] = param
        for holder, attribute in attributes:
            setattr(holder, attribute, storage)
        storages.append((suffix, storage))
    param.__dict__[STORAGES_ATTRIBUTE] = tuple(storages)
    if has_codes := "CB" in param.__dict__:
        # The codes are the parameter's data, under another name.
        param.__dict__["CB"] = None
        if hasattr(module, "state"):
            module.state.__dict__[_WEIGHT] = param
            module.state.__class__ = _class_reading_weight(module.state.__class__)
    undo.callback(_rejoin, module, param, places, has_codes)


def _rejoin(module: Any, param: nn.Parameter, places: list[_Place], has_codes: bool) -> None:
    """Undo ``_split``, unless the values are not on this rank: each use of them goes on to raise."""
    storages = storages_of(param)
    if any(has_no_values(storage) for _, storage in storages):
        return
    del param.__dict__[STORAGES_ATTRIBUTE]
    for _, attributes in places:
        plain = getattr(*attributes[0]).detach()
        for holder, attribute in attributes:
            setattr(holder, attribute, plain)
    if has_codes and hasattr(module, "state"):
        module.state.__class__ = type(module.state).__base__
        del module.state.__dict__[_WEIGHT]
        module.state.CB = param.data


@cache
def _class_reading_weight(cls: type) -> type:
    """Return a subclass of the state of a Linear8bitLt whose ``CB`` is the data of the weight.

    Every forward assigns ``CB`` to the weight's data, and every backward reads it.
    """

    def codes(state: Any) -> torch.Tensor:
        data: torch.Tensor = state.__dict__[_WEIGHT].data
        return data

    return type(cls.__name__, (cls,), {"CB": property(codes)})


def _has_quantized_values(param: nn.Parameter) -> bool:
    has_values: bool = getattr(param, "bnb_quantized", param.dtype is torch.int8)
    return has_values


def _places_of(name: str, module: nn.Module, param: Any) -> list[_Place]:
    """Return where the tensors of a quantized parameter are, besides its own data.

    Raises:
        ZeroEngineError: See ``split_quantized_parameters``.
    """
    kind = f"parameter {name} is a {type(param).__name__} of {library_of(param)}"
    if param.requires_grad:
        raise ZeroEngineError(
            f"{kind} and trainable: quantized weights have no gradients. Freeze it, "
            f"`model.get_parameter({name!r}).requires_grad_(False)`, and train adapters beside it (QLoRA)."
        )
    if is_traceable_wrapper_subclass(param):
        return list(_inner_places(kind, param, ""))
    if not _has_quantized_values(param):
        raise ZeroEngineError(
            f"{kind} that is not quantized yet, which happens when it is moved to a device: write "
            '`model.to("cpu")`, or `model.to("cuda")`, before initialize(). A model of meta_init() has no values to '
            "quantize: build it without."
        )
    if hasattr(param, "bnb_quantized"):
        state = param.quant_state
        if getattr(state, "packing_format_for_cpu", False):
            raise ZeroEngineError(
                f"{kind} which an evaluation on the CPU packed anew. `model.state_dict()` packs it as it was: call it "
                "before initialize()."
            )
        _check_tensors(kind, param, ())
        _check_tensors(kind, state, ("absmax", "code"), ("offset",))
        places: list[_Place] = [(".absmax", [(state, "absmax")]), (".quant_map", [(state, "code")])]
        if state.state2 is not None:
            _check_tensors(kind, state.state2, ("absmax", "code"))
            places += [
                (".nested_absmax", [(state.state2, "absmax")]),
                (".nested_quant_map", [(state.state2, "code")]),
                (".nested_offset", [(state, "offset")]),
            ]
        return places
    state = getattr(module, "state", None)
    holder = param if getattr(param, "SCB", None) is not None else state
    _check_tensors(kind, holder, ("SCB",), ("CB",))
    # ``load_state_dict()`` asks the parameter for the scales, and the forward their module's state.
    return [(".SCB", [(holder, "SCB"), *((other, "SCB") for other in (param, state) if other not in (holder, None))])]


def _inner_places(kind: str, wrapper: Any, prefix: str) -> Iterator[_Place]:
    for attribute in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, attribute, None)
        if inner is not None and is_traceable_wrapper_subclass(inner):
            yield from _inner_places(kind, inner, f"{prefix}.{attribute}")
        elif type(inner) in (torch.Tensor, nn.Parameter) and attribute in vars(wrapper):
            yield f"{prefix}.{attribute}", [(wrapper, attribute)]
        else:
            raise _unknown_layout(kind, f"{attribute} is {type(inner).__name__}, and no tensor in an attribute")


def map_wrapper(wrapper: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a weight of torchao like ``wrapper``, with ``function`` of each tensor in place of the tensor."""
    keys, context = wrapper.__tensor_flatten__()
    inner = {}
    for key in keys:
        tensor = getattr(wrapper, key)
        inner[key] = map_wrapper(tensor, function) if is_traceable_wrapper_subclass(tensor) else function(tensor)
    return class_of(wrapper).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())


def _check_tensors(kind: str, holder: Any, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise ``ZeroEngineError`` unless the tensors in attributes of ``holder`` are ``needed`` and some ``optional``."""
    tensors = {key for key, value in getattr(holder, "__dict__", {}).items() if isinstance(value, torch.Tensor)}
    where = type(holder).__name__
    for key in sorted(set(needed) - tensors):
        raise _unknown_layout(kind, f"{where} has no tensor {key}")
    for key in sorted(tensors - {*needed, *optional, *_TEMPORARY}):
        raise _unknown_layout(kind, f"{where} has a tensor {key}")


def _unknown_layout(kind: str, problem: str) -> ZeroEngineError:
    return ZeroEngineError(
        f"{kind} with a layout that is not known: {problem}. zeroengine knows that of bitsandbytes 0.48 to 0.50 and "
        "torchao 0.18: install such a version, and quantize the model with it anew."
    )
