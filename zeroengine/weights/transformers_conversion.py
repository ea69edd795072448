"""Convert weights between the layout of a transformers model and that of its files, by transformers' own mapping.

transformers 5 keeps some models in another layout than their files. A Mixtral layer has one tensor for the weights of
all its experts, and its files have two tensors for each expert:

    in the files                                              in the model
    model.layers.0.block_sparse_moe.experts.0.w1.weight  \\
    model.layers.0.block_sparse_moe.experts.0.w3.weight   |   model.layers.0.mlp.experts.gate_up_proj
    model.layers.0.block_sparse_moe.experts.1.w1.weight   |
    model.layers.0.block_sparse_moe.experts.1.w3.weight  /

The names are matched as `convert_and_load_state_dict_in_model` and `revert_weight_conversion` of
`transformers.core_model_loading` do it. These functions need all values in memory; here the shapes are computed first,
on the meta device, and values are converted a group at a time.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint.entries import part_of_box
from zeroengine.disk.read_only_file import ReadOnlyFile
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.utils.torch_internals import COMPILED_MODULE
from zeroengine.weights.conversion import BoxValues, ConversionPlan, TensorConversion
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.sources import WeightSource

# What is called of `transformers.core_model_loading`, whose functions change from version to version.
FUNCTIONS = ("apply_converters", "apply_renamings", "dot_natural_key", "rename_source_key", "PrefixChange")


class TensorGroup:
    """Tensors that one conversion computes from other tensors, such as all experts' weights of a layer.

    A conversion that treats every expert alike is done an expert at a time. Its group has so many parts, and what has
    one tensor for each expert on one side has one row for each, of the first dimension, on the other.

    Args:
        model: The transformers model.
        transform: The conversion, a `WeightConverter` of transformers.
        target: A name by which the conversion finds the names of its results.
        names: The names of the tensors that it takes, by the pattern that they match.
        specs: The shapes and dtypes of these and possibly more tensors.
        rename: Is applied to the names of the results.

    Attributes:
        sources: The names of all tensors that are taken.
        targets: The tensors that are computed.
        num_parts: The number of parts.

    Raises:
        CheckpointError: The tensors do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        transform: Any,
        target: str,
        names: Mapping[str, Sequence[str]],
        specs: Mapping[str, TensorSpec],
        rename: Callable[[str], str],
    ) -> None:
        self._model, self._transform, self._target, self._names = model, transform, target, names
        self._specs = {name: specs[name] for some_names in names.values() for name in some_names}
        self.sources = list(self._specs)
        with torch.no_grad():
            # Tensors on the meta device have shapes and no values, so this takes no memory.
            values = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in self._specs.values()]
            try:
                results = self._run(names, values)
            # Operations of transformers raise errors of many kinds where tensors are missing or of another shape.
            except Exception as error:
                counts = " and ".join(f"{len(some_names)} tensors *{pattern}" for pattern, some_names in names.items())
                raise CheckpointError(f"{target} cannot be made of {counts} ({error})") from error
        self.targets = {rename(name): TensorSpec(tuple(value.shape), value.dtype) for name, value in results.items()}
        # One side's rows of the first dimension are the other side's tensors.
        self._has_rows_of_sources = self._has_rows_of_targets = False
        self.num_parts = self._find_parts()

    def _find_parts(self) -> int:
        library = _library("core_model_loading")
        *first, last = operations = self._transform.operations
        if isinstance(operations[0], library.MergeModulelist) and operations[0].dim == 0:
            lengths = {len(names) for names in self._names.values()}
            lengths |= {spec.shape[0] for spec in self.targets.values()}
            self._has_rows_of_targets = len(lengths) == 1 and _keep_rows(operations[1:])
        elif isinstance(last, library.SplitModulelist) and last.dim == 0:
            lengths = {spec.shape[0] for spec in self._specs.values()}
            per_source = {len(names) for names in self._names.values()}
            self._has_rows_of_sources = len(lengths) == 1 and per_source == {1} and _keep_rows(first)
        return lengths.pop() if self._has_rows_of_targets or self._has_rows_of_sources else 1

    @property
    def settings(self) -> str:
        """As of `TensorConversion`."""
        return type(self).__name__

    def boxes(self, part: int) -> list[tuple[str, Box]]:
        """Return what a part is computed from: boxes of tensors by name, in the order that `convert` takes values."""
        if self._has_rows_of_sources:
            return [(name, _row(spec.shape, part)) for name, spec in self._specs.items()]
        return [(name, Box.whole(self._specs[name].shape)) for names in self._names_of(part).values() for name in names]

    def convert(self, part: int, values: Iterable[torch.Tensor]) -> dict[str, BoxValues]:
        """Return a part of the group, as values of boxes of the tensors in `targets`.

        Args:
            part: Counts from 0.
            values: What `boxes` lists.
        """
        with torch.no_grad():
            results = self._run(self._names_of(part), values).values()
        # The conversion numbers the rows that it splits from 0, and lists those of each target together.
        names = list(self.targets)[part :: self.num_parts] if self._has_rows_of_sources else list(self.targets)
        box_of = functools.partial(_row, index=part) if self._has_rows_of_targets else Box.whole
        return {name: (box_of(self.targets[name].shape), value) for name, value in zip(names, results, strict=True)}

    def parts_of(self, target: str, box: Box) -> range:
        """Return the parts that hold elements of a box of a target."""
        if self._has_rows_of_targets:
            return range(box.offsets[0], box.offsets[0] + box.sizes[0])
        part = list(self.targets).index(target) % self.num_parts
        return range(part, part + 1)

    def _names_of(self, part: int) -> Mapping[str, Sequence[str]]:
        if not self._has_rows_of_targets:
            return self._names
        return {pattern: names[part : part + 1] for pattern, names in self._names.items()}

    def _run(self, names: Mapping[str, Sequence[str]], values: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        remaining = iter(values)
        # The conversion keeps its inputs until it has run, so each run has a copy of it.
        transform = copy.deepcopy(self._transform)
        for pattern, some_names in names.items():
            transform.collected_tensors[pattern] = [next(remaining) for _ in some_names]
        results = transform.convert(self._target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def _keep_rows(operations: Sequence[Any]) -> bool:
    """Return whether operations treat every index of the first dimension alike and apart."""
    library = _library("core_model_loading")
    return all(isinstance(op, (library.Concatenate, library.Chunk)) and op.dim > 0 for op in operations)


def _row(shape: Sequence[int], index: int) -> Box:
    numel = torch.Size(shape[1:]).numel()
    return next(boxes_of_run(shape, index * numel, (index + 1) * numel))


# -- Which mapping --------------------------------------------------------------------------------


def _library(module: str) -> Any:
    """Return a module of transformers. It has no fixed types, and is not installed everywhere."""
    return importlib.import_module(f"transformers.{module}")


def _converted_model(module: nn.Module) -> Any | None:
    """Return the transformers model that `module` is; None where it is another, or transformers converts nothing."""
    module = getattr(module, COMPILED_MODULE, module)
    # Who has a transformers model has imported transformers, which takes seconds and is not imported for others.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return None
    try:
        library = _library("core_model_loading")
    except ImportError:
        # Before transformers 5 models and files have one layout.
        return None
    is_known = all(hasattr(library, name) for name in FUNCTIONS) and hasattr(
        module, "_adjust_missing_and_unexpected_keys"
    )
    return module if is_known else None


def plan_for_model(
    module: nn.Module, stored: Mapping[str, TensorSpec], own_names: Collection[str]
) -> ConversionPlan | None:
    """Return how the tensors of files become those of a model; None where nothing is converted.

    Tensors that are none of the model's keep their names. Those that transformers passes over, such as a table that an
    older version stored, are left out.

    Args:
        module: The model.
        stored: The tensors of the files.
        own_names: All names of the model's parameters and buffers.

    Raises:
        CheckpointError: Tensors of the files do not go together.
    """
    model = _converted_model(module)
    if model is None:
        return None
    library = _library("core_model_loading")
    transforms = _library("conversion_mapping").get_model_conversion_mapping(model)
    renamings, converters, converter_of = _by_kind(transforms)
    own = dict.fromkeys(own_names, True)
    old_names: dict[str, str] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    # Experts are merged in this order, and some renamings depend on the names before.
    matches = {
        name: library.rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        for name in sorted(stored, key=library.dot_natural_key)
    }
    unknown = {target for name, (target, _) in matches.items() if target not in own and name not in own}
    keys = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unknown))
    model._adjust_missing_and_unexpected_keys(keys)
    ignored = unknown - keys.unexpected_keys
    for name, (target, pattern) in matches.items():
        if target in ignored:
            continue
        # The name may be the model's own, as `model.state_dict()` has them, or none of the model's at all.
        if target not in own or (pattern is None and target in old_names):
            target, pattern = name, None
        if pattern is None:
            old_names.setdefault(target, name)
        else:
            sources.setdefault(target, {}).setdefault(pattern, []).append(name)
    rename = functools.partial(library.apply_renamings, weight_renamings=renamings)
    groups = [
        TensorGroup(model, converter_of[next(iter(names))], target, names, stored, lambda name: name)
        for target, names in sources.items()
    ]
    return ConversionPlan(old_names, groups, rename)


def plan_for_files(module: nn.Module, tensors: Mapping[str, TensorSpec]) -> ConversionPlan:
    """Return how the tensors of a model become those of its files: the same where nothing is converted.

    Args:
        module: The model.
        tensors: Its tensors, or some of them, each once.
    """
    model = _converted_model(module)
    if model is None:
        return ConversionPlan({name: name for name in tensors}, [], lambda name: name)
    library = _library("core_model_loading")
    # `from_pretrained` leaves on the model what it has converted by.
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = _library("conversion_mapping").get_model_conversion_mapping(model, add_legacy=False)
        # Whether the files had a prefix is known only where `from_pretrained` has read them.
        transforms = [transform for transform in transforms if not isinstance(transform, library.PrefixChange)]
    renamings, converters, converter_of = _by_kind([transform.reverse_transform() for transform in transforms[::-1]])
    rename = functools.partial(library.apply_renamings, weight_renamings=renamings)
    old_names: dict[str, str] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for name in sorted(tensors, key=library.dot_natural_key):
        target, pattern = library.apply_converters(name, converters)
        if pattern is None:
            old_names[rename(name)] = name
        else:
            sources.setdefault(target, {}).setdefault(pattern, []).append(name)
    groups = []
    for target, names in sources.items():
        converter = converter_of[next(iter(names))]
        if len(names) == len(converter.source_patterns):
            groups.append(TensorGroup(model, converter, target, names, tensors, rename))
        else:
            # A part of what the files hold as one tensor, such as one of two merged projections, keeps its own name.
            old_names |= {name: name for some_names in names.values() for name in some_names}
    return ConversionPlan(old_names, groups, rename)


def _by_kind(transforms: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the renamings, the converters, and the converter of each pattern."""
    library = _library("core_model_loading")
    renamings = [transform for transform in transforms if isinstance(transform, library.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, library.WeightConverter)]
    return renamings, converters, {pattern: other for other in converters for pattern in other.source_patterns}


# -- Reading --------------------------------------------------------------------------------------


def as_model_names(source: WeightSource, module: nn.Module, own_names: Collection[str]) -> WeightSource:
    """Return weights under the names and in the layout that the model has.

    What a converted tensor is computed from is read when a box of it is read, and the part that was computed last is
    kept.

    Args:
        source: The weights, as files hold them.
        module: The model.
        own_names: All names of its parameters and buffers.

    Raises:
        CheckpointError: Tensors do not go together.
    """
    try:
        plan = plan_for_model(module, source.tensors, own_names)
    except CheckpointError as error:
        raise CheckpointError(f"{source.where} is another model's: {error}") from error
    if plan is None:
        return source
    reads = _ConvertedReads(source, plan)
    return replace(source, tensors=plan.new_specs(source.tensors), read=reads.read, locate=reads.locate)


class _ConvertedReads:
    def __init__(self, source: WeightSource, plan: ConversionPlan) -> None:
        self._source, self._old_names = source, plan.old_names
        self._group_of = {name: group for group in plan.groups for name in group.targets}
        self._last: tuple[TensorConversion, int] | None = None
        self._values: dict[str, BoxValues] = {}

    def locate(self, name: str) -> tuple[ReadOnlyFile, int] | None:
        return None if name in self._group_of else self._source.locate(self._old_names[name])

    def read(self, name: str, box: Box) -> torch.Tensor:
        if name not in self._group_of:
            return self._source.read(self._old_names[name], box)
        group, rows = self._group_of[name], []
        for part in group.parts_of(name, box):
            part_box, values = self._convert(group, part)[name]
            # A part is the whole tensor or one row of it.
            offsets, sizes = (part, *box.offsets[1:]), (1, *box.sizes[1:])
            if part_box.sizes == group.targets[name].shape:
                offsets, sizes = box.offsets, box.sizes
            rows.append(part_of_box(values, part_box.offsets, offsets, sizes))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _convert(self, group: TensorConversion, part: int) -> dict[str, BoxValues]:
        if self._last != (group, part):
            # The last part is released before the next one is computed.
            self._last, self._values = None, {}
            values = (self._source.read(name, box) for name, box in group.boxes(part))
            self._last, self._values = (group, part), group.convert(part, values)
        return self._values
