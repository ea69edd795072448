"""The model of a plan, on the meta device: from a function, a configuration of Hugging Face, or plain numbers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zeroengine.config import Config
from zeroengine.deferred_init.meta_init import meta_init
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.algorithms import algorithms_of
from zeroengine.optim.factory import build_configured
from zeroengine.partition.cut import UnitPlan, check_has_parameters
from zeroengine.plan.trace.standard_decoder import StandardDecoder
from zeroengine.runtime.mixed_precision import units_of_model
from zeroengine.runtime.quantized_parameters import quantize_on_meta, split_quantized_parameters
from zeroengine.utils.tensors import map_tensors, tensors_in
from zeroengine.utils.torch_internals import FakeTensorMode, buffers_of

# The arguments and keyword arguments of one call of the model.
Batch = tuple[tuple[Any, ...], dict[str, Any]]
# Heads have this width where it divides that of the model, as in most large models.
HEAD_WIDTH = 128
# The width of a standard decoder's feed-forward is a multiple of this.
HIDDEN_MULTIPLE = 8
EXAMPLE = "`def build(): return Model(...)` or `return Model(...), make_batch`, where make_batch(n) returns n samples"


class LayerSplit(NamedTuple):
    """How a model is split over ranks.

    Attributes:
        size: The ranks that layers are split over, which compute each sample together.
        expert_size: The ranks that hold all experts together.
        styles: The style of each layer, as ``zeroengine.parallelize`` or transformers names it.
    """

    size: int = 1
    expert_size: int = 1
    styles: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ModelFacts:
    """A model without memory, and the batches that it takes.

    Attributes:
        name: What people call it.
        model: Its parameters and buffers are on the meta device.
        make_batch: Makes the arguments of a call of the model from a number of samples, or None if unknown. The model
            returns a loss, an object with a ``loss``, or tensors, whose mean stands for a loss.
        tokens_per_sample: The length of a sample in tokens, or None where it has none.
        split: How it is split over ranks. Its parameters have their whole shapes, and notes of their slices.
    """

    name: str
    model: nn.Module
    make_batch: Callable[[int], Batch] | None
    tokens_per_sample: int | None
    split: LayerSplit = field(default_factory=LayerSplit)

    @property
    def num_parameters(self) -> int:
        """Return the number of elements of all parameters; tied ones count once."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def num_trainable(self) -> int:
        """Return the number of elements of the parameters that are trained."""
        return sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    def with_tokens(self, tokens: int, sharing: int = 1) -> ModelFacts:
        """Return the facts of the same model with samples of another length.

        Args:
            tokens: The tokens of a sample.
            sharing: The number of ranks that share a sample. A batch is the part of one of them, with labels as
                ``shard_sequence`` adds them.
        """
        make_batch, length = self.make_batch, self.tokens_per_sample
        if make_batch is None or length is None:
            raise ZeroEngineError(f"{self.name}: sequence_parallel_size needs tokens, and its samples have none")

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            size = (*tensor.shape[:1], -(-tokens // sharing), *tensor.shape[2:])
            return tensor.new_empty(size) if tensor.dim() > 1 and tensor.shape[1] == length else tensor

        def make_resized(samples: int) -> Batch:
            args, kwargs = map_tensors(resized, make_batch(samples))
            if sharing > 1 and "labels" in kwargs:
                kwargs = {**kwargs, "shift_labels": kwargs["labels"]}
            return args, kwargs

        return replace(self, make_batch=make_resized, tokens_per_sample=tokens)

    def plans(self, config: Config) -> list[UnitPlan]:
        """Return the units that ``initialize`` cuts the model into. A configuration without an optimizer gets AdamW.

        Args:
            config: The resolved configuration.
        """
        optimizer = self.optimizer(config)
        if optimizer is None:
            optimizer = torch.optim.AdamW(self.model.parameters())
        return units_of_model(self.model, config, algorithms_of(optimizer, self.model, config))

    def optimizer(self, config: Config) -> torch.optim.Optimizer | None:
        """Return the optimizer that ``initialize`` makes of the configuration, if that names one.

        Args:
            config: The resolved configuration.
        """
        if config.optimizer is None:
            return None
        params = list(self.model.parameters())
        return build_configured(config.optimizer, self.model, [p for p in params if p.requires_grad] or params)


def from_module(
    model: nn.Module, name: str | None = None, make_batch: Callable[[int], Any] | None = None
) -> ModelFacts:
    """Return the facts of a model whose parameters are on the meta device. Buffers are moved there.

    Args:
        model: The model.
        name: What people call it; None: its class.
        make_batch: Returns a batch of so many samples: ``(args, kwargs)``, a tuple of arguments, a dict of keyword
            arguments, or one argument.

    Raises:
        ZeroEngineError: The model has no parameters, or parameters that are not on the meta device.
    """
    check_has_parameters(model)
    if lazy := [name for name, param in model.named_parameters() if is_lazy(param)]:
        raise ZeroEngineError(
            f"parameter {lazy[0]} has no shape yet: its module is lazy. Give the module its sizes, as in "
            "torch.nn.Linear(in_features, out_features)"
        )
    in_memory = [name for name, param in model.named_parameters() if not param.is_meta]
    if in_memory:
        raise ZeroEngineError(
            f"parameters have memory: {', '.join(in_memory[:4])}{' ...' if len(in_memory) > 4 else ''}. A plan "
            "allocates nothing: build the model inside `with zeroengine.meta_init(values=False):` and load no weights"
        )
    for module in model.modules():
        for key, buffer in buffers_of(module).items():
            if buffer is not None:
                buffers_of(module)[key] = buffer.to("meta")
    quantize_on_meta(model)
    split_quantized_parameters(model)
    normalized = None if make_batch is None else lambda samples: as_batch(make_batch(samples))
    return ModelFacts(name or type(model).__name__, model, normalized, _tokens_per_sample(normalized))


def as_batch(value: Any) -> Batch:
    """Return the arguments of a call that ``value``, which a user's function returned, stands for."""
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and isinstance(value[0], (tuple, list)) and isinstance(value[1], Mapping):
            return tuple(value[0]), dict(value[1])
        return tuple(value), {}
    return (value,), {}


def _tokens_per_sample(make_batch: Callable[[int], Batch] | None) -> int | None:
    """Return the length of the first two-dimensional tensor of integers, which are token numbers."""
    if make_batch is None:
        return None
    try:
        with FakeTensorMode():
            tensors = tensors_in(make_batch(1))
    except Exception as error:
        raise ZeroEngineError(
            f"make_batch(1) failed: {type(error).__name__}: {error}. Write a function of the number of samples that "
            "returns the arguments of a call, such as `lambda n: (torch.zeros(n, 64),)`"
        ) from error
    ids = (t for t in tensors if t.dim() == 2 and not t.is_floating_point())
    return next((t.shape[1] for t in ids), None)


def from_function(spec: str) -> ModelFacts:
    """Call ``module:function`` without giving parameters memory, and return the facts of the model that it returns.

    The module is imported with the current folder on its path, as ``python -m`` does.

    Args:
        spec: Such as ``train:build``. The function takes no arguments, and returns a model or a model and a function
            that makes a batch; see ``from_module``.

    Raises:
        ZeroEngineError: The function cannot be imported, fails, or returns something else.
    """
    module_name, colon, function_name = spec.partition(":")
    if not colon or not module_name or not function_name:
        raise ZeroEngineError(f"model {spec!r}: write module:function, such as train:build, with {EXAMPLE}")
    # The script's folder is not the user's current one where an installed command runs.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _prints_to_stderr():
            target: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:
        raise ZeroEngineError(
            f"model {spec}: cannot import it: {type(error).__name__}: {error}. The module is searched for from "
            f"{os.getcwd()}"
        ) from error
    try:
        with _prints_to_stderr(), meta_init(values=False):
            result = target()
    except (Exception, SystemExit) as error:
        raise ZeroEngineError(
            f"model {spec}: the function failed: {type(error).__name__}: {error}. It is called without arguments, and "
            f"parameters have no values, so it must not read them or move them to a device. Write {EXAMPLE}"
        ) from error
    model, make_batch = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module) or not (make_batch is None or callable(make_batch)):
        raise ZeroEngineError(f"model {spec}: the function returned {type(result).__name__}. Write {EXAMPLE}")
    try:
        return from_module(model, spec, make_batch)
    except ZeroEngineError as error:
        raise ZeroEngineError(f"model {spec}: {error}") from error


def _prints_to_stderr() -> contextlib.AbstractContextManager[object]:
    """Return a context in which the user's prints go to stderr, because stdout may be the JSON of a command."""
    return contextlib.redirect_stdout(sys.stderr)


def from_huggingface(config_json: str | Path, sequence: int | None = None) -> ModelFacts:
    """Build the model of a ``config.json`` of Hugging Face, with fp32 parameters, without memory.

    The class is the first of ``architectures``, or else the language model of the type. Keys and values are not
    cached (``use_cache``), as in training.

    Args:
        config_json: The file, or the folder that it is in.
        sequence: Tokens per sample; None: the longest that the model takes, at most 4,096. Models of images ignore it.

    Raises:
        ZeroEngineError: There is no transformers, or the file is not such a configuration.
    """
    path = Path(config_json)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ZeroEngineError(f"cannot read the model's configuration {path}: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ZeroEngineError(f'{path} is no configuration of a Hugging Face model: it has no "model_type"')
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ZeroEngineError(
            f"{path} is a model of transformers, which is not installed ({error}): pip install transformers"
        ) from error
    kind = content["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ZeroEngineError(
            f"{path}: transformers {transformers.__version__} has no model type {kind!r}. Write a function that builds "
            f"the model, and pass module:function: {EXAMPLE}"
        )
    try:
        settings = CONFIG_MAPPING[kind].from_dict(content)
        if getattr(settings, "use_cache", False):
            settings.use_cache = False
        with meta_init(values=False):
            model = _huggingface_class(transformers, settings)(settings)
    except Exception as error:
        raise ZeroEngineError(
            f"{path}: transformers {transformers.__version__} cannot build this model: {type(error).__name__}: {error}"
        ) from error
    longest = getattr(settings, "max_position_embeddings", None) or getattr(settings, "n_positions", None) or 4096
    make_batch = _huggingface_batches(model, settings, sequence or min(longest, 4096))
    return from_module(model, f"{type(model).__name__} ({path.parent.name or path.name})", make_batch)


def _huggingface_class(transformers: Any, settings: Any) -> Any:
    for name in settings.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in ("CausalLM", "Seq2SeqLM", "ImageClassification", "MaskedLM"):
        mapping = getattr(transformers, f"AutoModelFor{auto}")._model_mapping
        if type(settings) in mapping:
            return mapping[type(settings)]
    return transformers.AutoModel._model_mapping[type(settings)]


def _huggingface_batches(model: nn.Module, settings: Any, sequence: int) -> Callable[[int], Batch] | None:
    """Return a function that makes batches for ``model``, or None where its inputs are neither tokens nor images."""
    source = getattr(model, "main_input_name", None)
    parameters = inspect.signature(model.forward).parameters
    takes_labels = "labels" in parameters
    labels_of_samples = "Classification" in type(model).__name__ and "Token" not in type(model).__name__
    # A model of images and of text keeps the sizes of its inputs in configurations of its parts.
    if source not in ("input_ids", "pixel_values") or (
        source == "pixel_values" and not hasattr(settings, "image_size")
    ):
        return None

    def make_batch(samples: int) -> Batch:
        batch: dict[str, torch.Tensor]
        if source == "input_ids":
            batch = {"input_ids": torch.zeros(samples, sequence, dtype=torch.int64, device="meta")}
        else:
            size = settings.image_size
            height, width = (size, size) if isinstance(size, int) else size
            channels = getattr(settings, "num_channels", 3)
            batch = {"pixel_values": torch.zeros(samples, channels, height, width, device="meta")}
        if takes_labels:
            shape = (samples,) if labels_of_samples or source == "pixel_values" else (samples, sequence)
            batch["labels"] = torch.zeros(shape, dtype=torch.int64, device="meta")
        # An encoder-decoder would make these of the labels, for which its configuration must name the first token.
        if takes_labels and source == "input_ids" and "decoder_input_ids" in parameters:
            batch["decoder_input_ids"] = batch["input_ids"]
        return (), batch

    return make_batch


def from_numbers(
    params: float,
    layers: int,
    width: int,
    vocab: int,
    sequence: int,
    kv_heads: int | None = None,
) -> ModelFacts:
    """Return a decoder of this size, with the blocks of Llama and an embedding and a head that are not tied.

    Args:
        params: The number of parameters. It determines the width of the feed-forward, so it is met within a thousandth.
        layers: Blocks.
        width: The width of the residual stream.
        vocab: Tokens of the vocabulary.
        sequence: Tokens per sample.
        kv_heads: Heads of keys and values; None: as many as attention heads, which have 128 elements.

    Raises:
        ZeroEngineError: A number is not positive, the heads do not divide the width, or so few parameters do not
            suffice for the layers.
    """
    numbers = {"params": params, "layers": layers, "width": width, "vocab": vocab, "sequence": sequence}
    for name, value in numbers.items():
        if not 1 <= value < math.inf:
            raise ZeroEngineError(f"{name} is {value}; write a number of at least 1")
    heads = next(n for n in range(max(width // HEAD_WIDTH, 1), 0, -1) if width % n == 0)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ZeroEngineError(f"heads {heads}, kv_heads {kv_heads}: the first must be a multiple of the second")
    # The embedding and the head, the norms, and the attention.
    fixed = 2 * vocab * width + width + layers * (2 * width + 2 * width * (width + width * kv_heads // heads))
    of_hidden = 3 * layers * width
    hidden = round((params - fixed) / (of_hidden * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE
    if hidden < 1:
        raise ZeroEngineError(
            f"{params:,.0f} parameters: {layers} layers of width {width} and a vocabulary of {vocab:,} take {fixed:,} "
            "without any feed-forward. Write more parameters, or fewer layers, width or vocabulary"
        )
    with meta_init(values=False):
        model = StandardDecoder(vocab, layers, width, heads, hidden, kv_heads)

    def make_batch(samples: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(samples, sequence, dtype=torch.int64, device="meta") for _ in ("ids", "labels"))

    return from_module(model, f"decoder of {params / 1e9:.3g} B parameters", make_batch)
