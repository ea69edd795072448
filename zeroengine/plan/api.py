"""``zeroengine.plan``: which stage, which offload and which micro-batch a model should be trained with."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from zeroengine.config import ConfigLike, load
from zeroengine.engine.split_models import check_split_model, plan_of_specs
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.choice import can_offload
from zeroengine.optim.mixed_optimizer import describe_algorithms
from zeroengine.plan.report.result import Plan
from zeroengine.plan.search.candidates import (
    Choices,
    Estimate,
    PlanCandidate,
    ZeroSetting,
    choices_of,
    rank_estimates,
    shown_estimates,
)
from zeroengine.plan.search.degree_choices import DEFAULT, degree_choices
from zeroengine.plan.search.estimator import Estimator
from zeroengine.plan.search.scaling import merged
from zeroengine.plan.seconds.known_machines import load_machine
from zeroengine.plan.seconds.machine import Machine
from zeroengine.plan.seconds.step_time import machine_of_slice
from zeroengine.plan.trace.meta_copy import batches_like, copy_to_meta
from zeroengine.plan.trace.model_facts import ModelFacts, from_function, from_huggingface, from_module
from zeroengine.plan.trace.split_layers import split_facts
from zeroengine.runtime.dtensors import dtensors_in
from zeroengine.utils.formats import format_byte_size

DEFAULT_OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}}
# The errors of torch where a computation depends on values, which a trace does not have.
NEEDS_VALUES = {"DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"}
Tree = dict[str, Any]  # the keys of a configuration
MICRO, STEPS, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def plan(
    model: ModelFacts | nn.Module | str | Path,
    config: ConfigLike | None = None,
    machine: Machine | str | Path = "this",
    *,
    batch: int | None = None,
    example: Any = None,
    checkpointing: bool | None = None,
    sequence_parallel: Sequence[int] = (),
    tensor_parallel: Sequence[int] = (),
    expert_parallel: Sequence[int] = (),
    split_plan: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return what fits on a machine, how long a step takes, and which configuration is the best.

    Nothing is computed or allocated. What the configuration gives is kept: the stage, the offload, the micro-batch and
    the accumulation are chosen where they are absent or "auto".

        ids = torch.zeros(1, 16, dtype=torch.long)
        plan = zeroengine.plan(model, machine="h100-80gb", batch=256, example=(ids, ids))
        print(plan)
        print(plan.best.device_total, plan.configuration())

    Args:
        model: A module, which stays as it is; ``"module:function"``, where the function returns a model, or a model and
            a function that makes batches; the path of a ``config.json`` of Hugging Face; or ``ModelFacts``.
        config: A JSON, YAML or HJSON file, a dict, or None: AdamW, in bf16 on GPUs and in fp32 on CPUs.
        machine: A preset such as ``"h100-80gb"``, ``"this"``, a file of ``zero-plan --measure``, or a ``Machine``.
        batch: Samples of a step over all ranks. None: as configured; if that says nothing, one micro-step.
        example: For a module: arguments of its forward, as a tensor, a tuple or a dict. The samples are the first
            dimension of tensors, and their number does not matter. None: activations and times stay unknown.
        checkpointing: Whether activations are checkpointed. None: both are compared.
        sequence_parallel: Numbers of ranks that share a sample, to compare, each with the longest sequence that fits.
            Empty: as configured.
        tensor_parallel: Numbers of ranks that layers are split over, to compare. Empty: as configured.
        expert_parallel: Numbers of ranks that hold all experts together, to compare. Those above 1 count beside the
            numbers of ``tensor_parallel`` that divide them. Empty: as configured.
        split_plan: How layers are split: the argument ``plan`` of ``zeroengine.parallelize``. None: by the model's own
            plan.
        overrides: Values to set in the configuration, as in ``"zero_optimization.stage=3"``.
        progress: Called with what is being done.

    Raises:
        ZeroEngineError: The model or the machine cannot be loaded, or the model cannot be split.
        ConfigError: The configuration is wrong, or the ranks cannot share the batch.
    """
    progress("building the model")
    facts = model_facts(model, example)
    target = machine if isinstance(machine, Machine) else load_machine(machine)
    _check_links(target)
    tree, notes = _base_tree(config, overrides, target)
    if batch is not None:
        tree[TRAIN] = batch
    written = tree.pop("sequence_parallel_size", 1)
    sharings = tuple(sequence_parallel) or (written if isinstance(written, int) else 1,)
    layers = load(tree).tensor_parallel.partition_config
    split_plan = split_plan or dict(plan_of_specs(facts.model, layers)) or None
    written_layers = tree.get("tensor_parallel")
    searches = []
    for split in _take_splits(tree, tensor_parallel, expert_parallel):
        progress("splitting the model")
        own = split_facts(facts, *split, target.world_size, split_plan)
        searches.append(
            _open_search(own, {**tree, **_sections(*split, written_layers)}, target, sharings, checkpointing, notes)
        )
    estimator, choices = searches[0]
    asks = estimator.model.make_batch and facts.tokens_per_sample and (sequence_parallel or written != 1)
    progress("searching the longest sequence")
    longest = {sharing: estimator.longest_sequence(choices, sharing) for sharing in choices.sequence_parallel if asks}
    notes += [f"The longest sequence with sequence_parallel_size {n}: {size:,} tokens." for n, size in longest.items()]
    return replace(search(searches, [*dict.fromkeys(notes)], progress), longest_sequence=longest)


def _take_splits(tree: Tree, tensor_parallel: Sequence[int], expert_parallel: Sequence[int]) -> list[tuple[int, int]]:
    """Return the numbers of ranks that layers and experts are split over, and take the keys for them out of ``tree``.

    If there are several, those that do not fit together are left out.
    """
    config = load(tree)
    sizes = tensor_parallel or (max(config.tensor_parallel.autotp_size, 1),)
    splits = sorted(set(product(sizes, expert_parallel or (config.expert_parallel.size,))))
    for key in ("tensor_parallel", "expert_parallel"):
        tree.pop(key, None)
    return [(size, experts) for size, experts in splits if experts == 1 or experts % size == 0] or splits


def _sections(size: int, expert_size: int, layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the sections of a configuration that split layers and experts over so many ranks.

    Args:
        size: The ranks that layers are split over.
        expert_size: The ranks that experts are split over.
        layers: What the configuration says of layers.
    """
    experts = {"expert_parallel": {"enabled": True, "autoep_size": expert_size}} if expert_size > 1 else {}
    return experts | ({"tensor_parallel": {**(layers or {}), "autotp_size": size}} if size > 1 else {})


def _open_search(
    facts: ModelFacts,
    tree: Tree,
    target: Machine,
    sharings: Sequence[int],
    checkpointing: bool | None,
    notes: list[str],
) -> tuple[Estimator, Choices]:
    """Return what estimates the candidates of a model, which may be split, and what they leave open.

    Args:
        facts: The model.
        tree: The keys of the configuration.
        target: The machine.
        sharings: Numbers of ranks that share a sample.
        checkpointing: See ``plan``.
        notes: Gets sentences that the user should read.
    """
    data, split = machine_of_slice(target, facts.split.size), facts.split[:2]
    # Ranks that share samples are not compared with split models.
    sharings = (1,) if max(split) > 1 and 1 in sharings else tuple(sharings)
    # This checks the sizes, and finds the one that the others determine.
    open_sizes = tree.get(STEPS) is None and tree.get(MICRO) is None
    for sharing in sharings:
        sizes = load({**tree, "sequence_parallel_size": sharing} | ({MICRO: 1} if open_sizes else {})).resolve(
            world_size=target.world_size, ranks_per_node=data.ranks_per_node, ranks_per_model=facts.split.size
        )
    if sizes.local_steps is not None:
        tree["local_steps"] = sizes.local_steps.model_dump()
        notes.append(
            f"local_steps: replicas of {sizes.local_steps.replica_ranks} ranks, which exchange their parameters in one "
            f"of {sizes.local_steps.steps} steps; a step's time has that part of it."
        )
    optimizer = facts.optimizer(sizes)
    assert optimizer is not None, "the tree has one"
    if algorithms := describe_algorithms(optimizer):
        notes.append(f"{algorithms}.")
    check_split_model(sizes, facts.plans(sizes), optimizer)
    has_degrees = "degrees" in (tree.get("zero_optimization") or {})
    choices = choices_of(
        tree,
        target,
        can_offload=can_offload(optimizer),
        degrees=degree_choices(has_degrees, target, sizes),
    )
    choices = replace(choices, sequence_parallel=sharings, split=split)
    if facts.split.expert_size > 1:
        choices = replace(choices, offload_optimizer=("none",), offload_param=("none",), degrees=(DEFAULT,))
    if checkpointing is not None:
        choices = replace(choices, checkpointing=(checkpointing,))
    estimator = Estimator(facts, tree, target)
    problem = (
        "The model's inputs are unknown. Give an example, or let the function return a model and a function that makes "
        "batches"
        if facts.make_batch is None
        else _why_untraceable(estimator, max(sharings))
    )
    if problem is not None:
        estimator = Estimator(replace(facts, make_batch=None), tree, target)
        choices = replace(choices, checkpointing=(False,), micro_batch=choices.micro_batch or 1)
        notes.append(f"{problem}. Activations, micro-batches and times are left out.")
    return estimator, choices


def _why_untraceable(estimator: Estimator, sharing: int) -> str | None:
    """Return why a micro-step cannot be traced without values, or None if it can be.

    Raises:
        ZeroEngineError: A micro-step fails for another reason, such as a wrong example.
    """
    # Torch logs the traceback of an operation that fails, beside the error.
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_log.level
    torch_log.setLevel(logging.CRITICAL + 1)
    try:
        estimator.micro_step(replace(estimator.base, sequence_parallel=sharing))
    except ZeroEngineError as error:
        if type(error.__cause__).__name__ not in NEEDS_VALUES:
            raise
        return str(error)
    finally:
        torch_log.setLevel(level)
    return None


def search(
    searches: Sequence[tuple[Estimator, Choices]], notes: Sequence[str], progress: Callable[[str], None]
) -> Plan:
    """Estimate all candidates, put them in order, and return the plan.

    Args:
        searches: What estimates candidates of one model on one machine, and what is left open: for each way to split
            the model.
        notes: Sentences that the user should read.
        progress: Called with what is being done.
    """
    estimates: list[Estimate] = []
    largest_micro_batch: dict[ZeroSetting, int] = {}
    configurations: dict[PlanCandidate, dict[str, Any]] = {}
    for estimator, choices in searches:
        own_estimates, own_largest = estimator.estimates(choices, progress)
        estimates += own_estimates
        largest_micro_batch |= own_largest
        configurations |= {e.candidate: estimator.tree(e.candidate) for e in own_estimates}
    ranked = rank_estimates(estimates)
    shown = shown_estimates(ranked)
    in_order: list[Estimate] = [*shown, *(e for e in ranked if not any(e is other for other in shown))]
    machine = estimator.machine
    # Each rank builds the model for itself.
    values = machine.ranks_per_node * sum(param.nbytes for param in estimator.model.model.parameters())
    if values > machine.host_bytes:
        notes = [
            *notes,
            f"Build the model under zeroengine.meta_init(): otherwise its values take "
            f"{format_byte_size(values)} on each node, which has {format_byte_size(machine.host_bytes)} of CPU memory.",
        ]
    config = estimator.config(estimator.base)
    return Plan(
        model_name=estimator.model.name,
        num_parameters=estimator.model.num_parameters,
        num_trainable=estimator.model.num_trainable,
        tokens_per_sample=estimator.model.tokens_per_sample,
        machine=estimator.machine,
        precision=config.precision,
        optimizer=config.optimizer.type if config.optimizer is not None else "no optimizer",
        estimates=in_order,
        num_shown=len(shown),
        largest_micro_batch=largest_micro_batch,
        configurations=[configurations[estimate.candidate] for estimate in in_order],
        notes=tuple(notes),
    )


def model_facts(
    model: ModelFacts | nn.Module | str | Path, example: Any = None, sequence: int | None = None
) -> ModelFacts:
    """Return the facts of a model that was given in any of the ways of `plan`.

    Args:
        model: The model.
        example: For a module, arguments of its forward.
        sequence: For a ``config.json``, tokens per sample.

    Raises:
        ZeroEngineError: It cannot be loaded.
    """
    if isinstance(model, ModelFacts):
        return model
    if isinstance(model, nn.Module):
        for name, _ in dtensors_in(model):
            raise ZeroEngineError(
                f"plan(): parameter {name} is split already: pass the model as it was before, and tensor_parallel=(2,)"
            )
        return from_module(copy_to_meta(model), make_batch=None if example is None else batches_like(example))
    if not isinstance(model, (str, Path)):
        raise ZeroEngineError(
            'plan() takes a torch.nn.Module, "module:function" or the path of a config.json, found '
            f"{type(model).__name__}"
        )
    if Path(model).exists() or str(model).endswith(".json"):
        return from_huggingface(model, sequence)
    return from_function(str(model))


def _check_links(machine: Machine) -> None:
    """Raise `ZeroEngineError` if several ranks are planned for on a machine that was measured with too few."""
    if machine.ranks_per_node > 1 and not (machine.rates.link and machine.rates.reduce_link):
        raise ZeroEngineError(
            f"The link between ranks of machine {machine.name} is unknown. Measure it: `zero-plan --measure FILE "
            f"--ranks-per-node {machine.ranks_per_node}`"
        )
    if machine.nodes > 1 and not machine.rates.node_link:
        raise ZeroEngineError(
            f"The link between nodes of machine {machine.name} is unknown. Measure on several nodes: `zero-launch "
            "--hostfile hosts -m zeroengine.plan.measure FILE`; or give it: `zero-plan --network 25Gbit`, or "
            '"node_link" in its file, in bytes per second'
        )


def machine_with(machine: Machine, **changes: int | None) -> Machine:
    """Return `machine` with the fields that are given, such as ``nodes=2``.

    On CPU ranks share the memory of their node, so that of a rank follows from it.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    result = dataclasses.replace(machine, **given)  # type: ignore[arg-type]
    if machine.device == "cpu" and "device_bytes" not in given:
        return replace(result, device_bytes=result.host_bytes // result.ranks_per_node)
    return result


def _base_tree(
    config: ConfigLike | None, overrides: Sequence[str], machine: Machine
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that all candidates share, as they were written, and what was assumed."""
    notes: list[str] = []
    if config is None:
        config = {"gradient_clipping": 1.0}
        # An override may choose the precision.
        precision = load(config, overrides).precision
        if machine.device == "cuda" and precision == "fp32":
            config["bf16"], precision = {"enabled": True}, "bf16"
        notes.append(f"No configuration is given: AdamW in {precision}, gradients clipped at 1.0.")
    loaded = load(config, overrides)
    tree: dict[str, Any] = copy.deepcopy(loaded._written.tree if loaded._written is not None else loaded.to_dict())
    if tree.get("optimizer") is None:
        if notes == []:
            notes.append("The configuration has no optimizer: AdamW is assumed.")
        tree = merged(tree, DEFAULT_OPTIMIZER)
    for key in (MICRO, STEPS, TRAIN):
        if tree.get(key) in ("auto", None):
            tree.pop(key, None)
    if loaded.zero_optimization.degrees is not None:
        # Degrees are those of one stage, so no other stages are compared.
        tree["zero_optimization"]["stage"] = loaded.zero_optimization.stage
    return tree, notes
