"""Cut a model into units: the parameters that are gathered and released together.

A unit is a set of parameters; hooks sit on modules. The *modules* of a unit are those whose forward needs it, so a tied
parameter belongs to one unit and that unit has the modules of both its uses.

[Note: How to add a rule for cutting]
1. Write a function that finds the root modules and their names, as ``_repeated_blocks`` and ``_match`` do, and choose
   it in ``cut_units``. All rules share the code after that (tied parameters, the rest, dtypes).
2. Add its key next to ``units`` in ``config/model.py``, and to ``ZEROENGINE_ONLY`` in ``config/loading.py``.
3. Pass its value to ``cut_units`` in ``units_of_model`` (``runtime/mixed_precision.py``), which ``initialize`` and the
   plan call.
4. If it names parts of the model, add it to ``KEYS_OF_TRAINED_MODEL`` in ``integrations/evaluation.py``, and to the
   keys that accelerate's ``prepare_model`` passes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.slices import expert_ranks, is_split, local_numel, whole_shape
from zeroengine.partition.storages import exact_storages, storages_of
from zeroengine.partition.unit_lists import find_unit_lists
from zeroengine.utils.torch_internals import COMPILED_MODULE

# Counted in elements. Outside of the blocks, a parameter of at least this size, such as an embedding, is a unit.
LARGE_PARAM = 1 << 20
# Counted in elements. Smaller parameters outside of the blocks are grouped into units of up to this size.
REST_UNIT = 1 << 22


class Algorithm(NamedTuple):
    """What updates a parameter, and the moments that it keeps. A unit has one.

    Attributes:
        name: The class of the optimizer; "" if nothing updates it.
        num_moments: The values that a rule of this package keeps of an element.
        moments_dtype: Their dtype; uint8 with a scale for each block.
        block: The elements of a parameter that share a scale, and are updated by one rank; 1 without scales.
    """

    name: str = ""
    num_moments: int = 2
    moments_dtype: torch.dtype = torch.float32
    block: int = 1

    def moment_bytes(self, numel: int) -> list[int]:
        """Return the bytes of each tensor that holds moments of ``numel`` elements."""
        scales = [numel // self.block * torch.float32.itemsize] if self.block > 1 else []
        return [numel * self.moments_dtype.itemsize, *scales] * self.num_moments


# Of frozen parameters, and of trainable ones where nothing is known: Adam's.
NO_ALGORITHM = Algorithm()


@dataclass(frozen=True)
class UnitPlan:
    """The parameters of one unit, and the modules whose forward needs them."""

    name: str
    params: tuple[tuple[str, nn.Parameter], ...]  # with their names
    modules: tuple[nn.Module, ...]
    dtype: torch.dtype  # that the model computes in
    trainable: bool
    root: nn.Module | None = None  # the module that holds all of them, if there is one
    positions: tuple[int, ...] = ()  # of each of ``modules`` among the modules of the model, in their order
    algorithm: Algorithm = NO_ALGORITHM  # what updates it, if it is trainable
    fp32_masters: bool = True  # of parameters in bf16 and fp16 that are trainable
    is_split: bool = False  # whether each rank of a model group has another part of its parameters
    expert_ranks: int = 0  # of experts that are split: the ranks with the same ones, over which they are partitioned
    whole_name: str = ""  # the name that the unit with its parameters has in the same model if none is split

    @property
    def numel(self) -> int:
        """Elements of the parameters on this rank, without padding."""
        return sum(local_numel(param) for _, param in self.params)

    def data_ranks(self, world_size: int) -> int:
        """Return the number of ranks that its states are partitioned over, of ``world_size`` data-parallel ones."""
        return self.expert_ranks or world_size

    @property
    def num_uses(self) -> int:
        """How many modules need the unit in one forward, without those inside of another one that keeps it gathered."""
        inside = {inner for module in self.modules for inner in module.modules() if inner is not module}
        return sum(module not in inside for module in self.modules)

    @property
    def has_master(self) -> bool:
        """Whether an fp32 master is updated instead of the parameters, which are bf16 or fp16."""
        return self.trainable and self.fp32_masters and self.dtype in (torch.bfloat16, torch.float16)


class _Kind(NamedTuple):
    """What all parameters of a unit share.

    Attributes:
        dtype: What the model computes in.
        trainable: Whether they get gradients.
        algorithm: What updates them.
        is_split: Whether each rank of a model group has another part of them.
        expert_ranks: See ``UnitPlan``.
    """

    dtype: torch.dtype
    trainable: bool
    algorithm: Algorithm
    is_split: bool = False
    expert_ranks: int = 0


class _Group(NamedTuple):
    """Parameters that become one unit, or a unit for each kind."""

    name: str
    root: nn.Module | None  # the module that holds all of them, if there is one
    params: list[tuple[str, nn.Parameter]]


def check_has_parameters(model: nn.Module) -> None:
    """Check that there is something to partition.

    Raises:
        ZeroEngineError: ``model`` has no parameters.
    """
    if next(model.parameters(), None) is None:
        raise ZeroEngineError(
            f"the model ({type(model).__name__}) has no parameters: there is nothing to partition. "
            "Pass the module that holds the weights."
        )


def cut_units(
    model: nn.Module,
    *,
    patterns: Sequence[str] | None = None,
    compute_dtype: torch.dtype | None = None,
    keep_fp32: Collection[nn.Parameter] = (),
    keep_dtype: Collection[torch.Tensor] = (),
    algorithms: Mapping[nn.Parameter, Algorithm] = MappingProxyType({}),
    fp32_masters: bool = True,
) -> list[UnitPlan]:
    """Cut ``model`` into units, in registration order but for "Lists of units" in ``unit_lists.py``.

    Each block in a repeated container is a unit. Such a container is a ``ModuleList``, ``ModuleDict`` or ``Sequential``
    of at least two modules of one class that have child modules. Each large parameter of the rest is a unit, and the
    others are grouped. A tied parameter belongs to the unit in which it is registered first. A unit has one dtype and
    one algorithm, and is trainable or frozen as a whole, so a block of mixed parameters becomes several units.

    Args:
        patterns: Module-name patterns (``fnmatch``, such as ``"layers.*"``). The modules that match are the blocks. Of
            the matches of one pattern the outermost count. A match of another pattern inside of a block is a block of
            its own, and the outer block is the rest: ``["layers.*", "layers.*.experts.*"]``.
        compute_dtype: The dtype that floating-point parameters are converted to, or None to keep their dtypes.
        keep_fp32: Parameters that are converted to fp32 instead.
        keep_dtype: Parameters that are not converted.
        algorithms: What updates each trainable parameter.
        fp32_masters: Whether fp32 masters of bf16 and fp16 parameters are updated.

    Raises:
        ZeroEngineError: The model has no parameters, or a trainable one that keeps a dtype of eight bits, or a pattern
            matches no module with parameters.
    """
    check_has_parameters(model)
    names: dict[nn.Parameter, str] = {}
    exact = exact_storages(model)
    for name, param in model.named_parameters():
        names |= {storage: plain_name(name) + suffix for suffix, storage in storages_of(param)}
    roots = dict(_repeated_blocks(model)) if patterns is None else _match(model, patterns)
    params_of: dict[str, list[nn.Parameter]] = {name: [] for name in roots}
    taken: set[nn.Parameter] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        # The innermost of the blocks around it.
        root_name = next((outer for outer in _above(plain_name(name)) if outer in roots), None)
        if root_name is not None and param not in taken:
            storages = [storage for _, storage in storages_of(param)]
            taken.update([param, *storages])
            params_of[root_name] += storages
    groups = [
        _Group(name, root, [(names[param], param) for param in params_of[name]])
        for name, root in roots.items()
        if params_of[name]
    ]
    groups += _group_rest([(name, param) for param, name in names.items() if param not in taken])
    order = {param: i for i, param in enumerate(names)}
    # The order of registration is the same on every rank.
    groups.sort(key=lambda g: order[g.params[0][1]])
    owners = _owners(model)
    positions = {module: position for position, module in enumerate(model.modules())}

    def dtype_of(param: nn.Parameter) -> torch.dtype:
        if param in exact:
            return param.dtype
        if not is_wide_float(param) and not (param.is_floating_point() and param.requires_grad):
            return param.dtype
        if compute_dtype is None or param in keep_dtype:
            # torch does not add gradients of eight bits.
            if not is_wide_float(param):
                raise ZeroEngineError(
                    f"parameter {names[param]} is {param.dtype} and trainable, and torch computes no gradients in that "
                    "dtype. Freeze it, cast it (`param.data = param.data.bfloat16()`) before initialize(), or write "
                    '"bf16": {"enabled": true}, and no pattern of keep_dtype that matches it.'
                )
            return param.dtype
        return torch.float32 if param in keep_fp32 else compute_dtype

    def kind_of(param: nn.Parameter) -> _Kind:
        algorithm = algorithms.get(param, NO_ALGORITHM) if param.requires_grad else NO_ALGORITHM
        return _Kind(dtype_of(param), param.requires_grad, algorithm, is_split(param), expert_ranks(param))

    units = _with_holders(model, [unit for group in groups for unit in _split(group, owners, kind_of)], owners)
    return [
        dataclasses.replace(
            unit, positions=tuple(positions[module] for module in unit.modules), fp32_masters=fp32_masters
        )
        for unit in units
    ]


def plain_name(name: str) -> str:
    """Return ``name`` without the parts that torch.compile adds when it wraps a module."""
    return ".".join(part for part in name.split(".") if part != COMPILED_MODULE)


def is_wide_float(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is floating and wider than eight bits, so that mixed precision may cast it.

    Floats of eight bits are quantized weights. Their modules choose kernels by this dtype, and without the scale that
    belongs to them a cast copy would be a wrong weight.
    """
    return tensor.is_floating_point() and tensor.element_size() > 1


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the items of the outermost repeated containers, with their names."""
    # Modules without parameters are not gathered, so they are no blocks.
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_params(child)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        kinds = Counter(type(child) for _, child in children)
        # Bare layers, such as those of an MLP, are no blocks, because such units would be too small.
        composed = {type(child) for _, child in children if next(child.children(), None) is not None}
        repeated = {kind for kind in composed if kinds[kind] > 1}
    else:
        repeated = set()
    for name, child in children:
        # Only the outermost repeated modules are units, so the inside of a block is not searched.
        if type(child) in repeated:
            yield plain_name(name), child
        else:
            yield from _repeated_blocks(child, f"{name}.")


def _match(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    roots: dict[str, nn.Module] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if plain_name(name) and _has_params(module):
            # If torch.compile wrapped a module, both have this name. The wrapper comes first, and is what is called.
            modules.setdefault(plain_name(name), module)
    for pattern in patterns:
        matches = {name: module for name, module in modules.items() if fnmatch.fnmatchcase(name, pattern)}
        if not matches:
            known = ", ".join(list(modules)[:8])
            raise ZeroEngineError(
                f"units: the pattern {pattern!r} matches no module with parameters. Modules are named like: {known}"
            )
        # "layers.*" also matches "layers.0.attention", and only the outermost match of a pattern is a unit.
        roots.update({name: module for name, module in matches.items() if matches.keys().isdisjoint(_above(name))})
    return roots


def _above(name: str) -> Iterator[str]:
    """Yield the names of the modules that the module ``name`` is inside of, but for the model itself."""
    while name := name.rpartition(".")[0]:
        yield name


def _group_rest(rest: list[tuple[str, nn.Parameter]]) -> list[_Group]:
    groups: list[_Group] = []
    small: list[tuple[str, nn.Parameter]] | None = None
    small_numel = 0
    for name, param in rest:
        numel = math.prod(whole_shape(param))
        if numel >= LARGE_PARAM:
            groups.append(_Group(name, None, [(name, param)]))
            continue
        if small is None or small_numel + numel > REST_UNIT:
            # No module contains exactly this group, so it is named after its first parameter.
            groups.append(_Group("rest" if small is None else f"rest.{name}", None, small := []))
            small_numel = 0
        small.append((name, param))
        small_numel += numel
    return groups


def _owners(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Return for each parameter the modules that register it directly."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            for _, storage in storages_of(param):
                owners.setdefault(storage, []).append(module)
    return owners


def _split(
    group: _Group, owners: dict[nn.Parameter, list[nn.Module]], kind_of: Callable[[nn.Parameter], _Kind]
) -> Iterator[UnitPlan]:
    """Yield one unit for each kind of parameters in the group, trainable first."""
    # A flat buffer has one dtype, and gets gradients for all of its parameters or for none.
    kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, param in group.params:
        kinds.setdefault(kind_of(param), []).append((name, param))
    inside = set(group.root.modules()) if group.root is not None else set()
    whole_kinds = {kind: kind._replace(is_split=False, expert_ranks=0) for kind in kinds}
    for kind, params in sorted(kinds.items(), key=lambda item: not item[0].trainable):
        # A parameter of a block that is tied to a module outside of the block is also needed there.
        modules = [group.root] if group.root is not None else []
        for _, param in params:
            modules += [m for m in owners[param] if m not in inside and m not in modules]
        yield UnitPlan(
            _name(group.name, kind, kinds),
            tuple(params),
            tuple(modules),
            kind.dtype,
            kind.trainable,
            group.root,
            algorithm=kind.algorithm,
            is_split=kind.is_split,
            expert_ranks=kind.expert_ranks,
            whole_name=_name(group.name, whole_kinds[kind], whole_kinds.values()),
        )


def _name(group_name: str, kind: _Kind, kinds: Collection[_Kind]) -> str:
    """Return the name of the unit of a kind, of those that there are in a group."""
    # The main part keeps the plain name, so that a block with one frozen parameter is still found by its name.
    if kind == min(kinds, key=lambda kind: (not kind.trainable, not kind.is_split)):
        return group_name
    algorithms = {kind.algorithm for kind in kinds if kind.trainable}
    has_split = any(kind.is_split for kind in kinds)
    has_names, has_dtypes = len({a.name for a in algorithms}) > 1, len({a.moments_dtype for a in algorithms}) > 1
    algorithm, words = kind.algorithm, ["frozen"] * (not kind.trainable) + [str(kind.dtype)[6:]]
    words += [algorithm.name] * (has_names and kind.trainable)
    words += [f"{str(algorithm.moments_dtype)[6:]} moments"] * (has_dtypes and kind.trainable)
    words += ["whole"] * (has_split and not kind.is_split) + ["experts"] * bool(kind.expert_ranks)
    return f"{group_name} ({', '.join(words)})"


def _with_holders(
    model: nn.Module, units: list[UnitPlan], owners: dict[nn.Parameter, list[nn.Module]]
) -> list[UnitPlan]:
    """Apply the rules of "Lists of units" in ``unit_lists.py``."""
    for unit_list in find_unit_lists(model, {unit.root for unit in units if unit.root is not None}):
        others, items = unit_list.others(), set(unit_list.items)
        first = next(index for index, unit in enumerate(units) if unit.root in items)
        before: list[UnitPlan] = []
        behind: list[UnitPlan] = []
        for index, unit in enumerate(units):
            users = (owner for _, param in unit.params for owner in owners[param])
            is_needed = unit.root not in items and not others.isdisjoint(users)
            if is_needed and unit_list.holder not in unit.modules:
                unit = dataclasses.replace(unit, modules=(*unit.modules, unit_list.holder))
            (before if is_needed or index < first else behind).append(unit)
        units = before + behind
    return units
