"""List DeepSpeed's keys that are not fields of the models, and sort a configuration's keys by them.

Every key that DeepSpeed 0.19 reads is a field of `model.py` (honored), or it or its block has a row in `TABLE`:

- "no effect": the key is accepted, and a notice says why it changes nothing here.
- "refused": the key is an error that says why. It would change results, or the user relies on a missing feature.

A row is silent where the key's value asks for nothing: "auto", one of `off`, or a block that is empty or switched off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from zeroengine.config.optimizers import is_import_path
from zeroengine.config.source import ConfigSource, KeyPath, as_json

COMMENT_PREFIXES = ("_comment", "$comment", "//")
SWITCHED_OFF = (False, None, 0, "none", "auto")


@dataclass(frozen=True)
class DeepSpeedKey:
    """One key of DeepSpeed that no model has.

    Attributes:
        status: Whether the key has no effect here or is refused.
        path: The key's path in the file, joined by dots. A row below may stand for several, separated by spaces.
        reason: Why, and what to write instead; the end of a sentence, without its full stop.
        off: The values that ask for nothing.
        switch: The key that turns a block on; a block without it is off. An empty string: the block is always on.
    """

    status: Literal["no effect", "refused"]
    path: str
    reason: str
    off: tuple[Any, ...] = (False, None)
    switch: str = "enabled"

    def is_off(self, value: Any) -> bool:
        """Tell whether `value` asks for nothing: an off value, an empty block, or a block that is switched off."""
        if isinstance(value, dict) and value:
            # A block asks for nothing where its switch is off, whatever its other keys say.
            return bool(self.switch) and value.get(self.switch) in SWITCHED_OFF
        # True equals 1 in Python, so the types are compared as well. A number may be written as a float.
        return value in ("auto", {}) or any(value == off and type(value) in (type(off), float) for off in self.off)


_no_effect = partial(DeepSpeedKey, "no effect")
# What these keys speak of cannot be chosen: false has no effect either, so only null asks for nothing.
_fixed = partial(DeepSpeedKey, "no effect", off=(None,))
_refused = partial(DeepSpeedKey, "refused")

# Old or second spellings of honored keys: the canonical path by the written path.
ALIASES = {
    "bfloat16": "bf16",
    "bf16.check_grad_overflow": "check_grad_overflow",
    "bf16.check_overflow": "check_grad_overflow",
    "zero_optimization.stage3_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_optimization.mics_shard_size": "zero_optimization.degrees.parameters",
    "zero_optimization.zero_hpz_partition_size": "zero_optimization.degrees.secondary_parameters",
}
# Values under second spellings that ask for nothing.
UNSET_ALIASES: dict[str, tuple[Any, ...]] = {
    "zero_optimization.mics_shard_size": (-1, None),
    "zero_optimization.zero_hpz_partition_size": (0, 1, None),
}

_DS_FORMAT = "checkpoints here are torch Distributed Checkpoints, one format for every stage and world size"
_REMOVED = "DeepSpeed itself removed it, and it is not available here"

# The rows by what their paths begin with.
# fmt: off
_ROWS = {
    "": [
        _no_effect("timers.throughput.synchronized", "the device is never made to wait for a timer",
            off=(True, False, None)),
        _no_effect("comms_logger.prof_all comms_logger.prof_ops", "every operation is logged", off=(True, [], None)),
        _no_effect("comet.mode", "the experiment of experiment_key is continued if it exists, and made if not",
            off=("get_or_create", None)),
        _no_effect("comms_logger.debug", "units are always named, and nothing else calls collectives"),
        _no_effect("log_level", "set the level of Python's logger \"zeroengine\""),
        _no_effect("vocabulary_size", "DeepSpeed only warns about its alignment"),
        _no_effect("dataloader_drop_last", "it is an argument of your data loader, and of engine.dataloader()"),
        _no_effect("disable_allgather", "updated parameters are always gathered"),
        _no_effect("disable_python_gc", "the garbage collector is yours; call gc.disable()"),
        _no_effect("zero_allow_untested_optimizer", "every optimizer that looks at one parameter at a time is allowed"),
        _no_effect("zero_force_ds_cpu_optimizer", "the update runs where the optimizer state lives"),
        _fixed("allgather_size", "gathers are sized by units"),
        _no_effect("use_data_before_expert_parallelism", "experts are split over consecutive ranks"),
        _fixed("seq_parallel_communication_data_type", "activations travel in their own dtype"),
        _no_effect("graph_harvesting", "no CUDA graphs are captured; the numbers are the same"),
        _no_effect("aio.intra_op_parallelism aio.thread_count", "one queue of queue_depth requests serves a rank",
            off=(1, None)),
        _fixed("aio.single_submit", "requests are submitted as the queue has room"),
        _fixed("aio.overlap_events", "requests are always under way together"),
        _no_effect("aio.use_gds", "states go through CPU memory"),
        _fixed("checkpoint.tag_validation", "a checkpoint is whole or absent on every rank"),
        _no_effect("checkpoint.load_universal", "every checkpoint loads at any stage and world size"),
        _refused("checkpoint.use_node_local_storage", "a checkpoint is one directory that all ranks see"),
        _no_effect("checkpoint.parallel_write", "all ranks write their own shards, always", switch=""),
        _fixed("checkpoint.checkpoint_serialization", _DS_FORMAT),
        _no_effect("checkpoint.writer datastates_ckpt", _DS_FORMAT, switch=""),
        _refused("nebula quantize_training progressive_layer_drop sparse_attention eigenvalue", _REMOVED),
        _fixed("fp16.auto_cast", "floating inputs are always cast"),
        _refused("bf16.bf16_optimizer_states", 'write "optimizer_state_dtype": "bf16" at the top level'),
        _no_effect("bf16.immediate_grad_update", "gradients are always reduced as they are produced"),
        _fixed("torch_autocast.lower_precision_safe_modules",
            "torch.autocast's own lists decide operation by operation; communication_data_type is that of reductions"),
        _refused("amp", "Apex is not supported; use bf16"),
        _refused("data_types.param_dtype", "use bf16 to choose the compute dtype", off=(None,)),
        _no_effect("data_types.keep_in_fp32_modules",
            "buffers keep their dtype unless buffer_dtype is given; keep_fp32_modules keeps whole modules in fp32",
            off=([], None)),
        _no_effect("tensor_parallel.tp_overlap_comm tensor_parallel.keep_module_on_host",
            "layers compute as the model's library splits them"),
        _no_effect("tensor_parallel.dtype", "bf16 and fp16 choose the dtype", off=(None,)),
        _no_effect("tensor_parallel.preset_model", "the model's own plan is used, or layer_specs", off=(None,)),
        _no_effect("tensor_parallel.partition_config.use_default_specs tensor_parallel.partition_config.strict_mode",
            "layer_specs alone say what is split, by autotp_size"),
        _no_effect("tensor_parallel.vocab_parallel_lm_head tensor_parallel.vocab_parallel_ce_backend",
            "the model's own plan says whether its head is split", off=(None, "torch")),
        _refused("tensor_parallel.tp tensor_parallel.tensor_parallel tensor_parallel.injection_policy_tuple",
            "write autotp_size", off=({}, None), switch=""),
        _refused("tensor_parallel.replace_with_kernel_inject tensor_parallel.kernel_inject",
            "there are no kernels for inference"),
        _refused("expert_parallel.use_grouped_gemm expert_parallel.expert_tensor_parallel_size",
            "experts compute as the model's library splits them", off=(True, 1, None)),
        _refused("pipeline", "there is no pipeline parallelism", switch=""),
        _refused("hybrid_engine", "there is no inference engine; generate inside zeroengine.gathered(model)"),
        _refused("weight_quantization", "weights are not quantized", switch=""),
        _refused("compression_training", _REMOVED, switch=""),
        _refused("data_efficiency", "data sampling and routing are yours; do them in your data loader and model"),
        _refused("compile", "DeepCompile is not available; use torch.compile on the model's blocks",
            switch="deepcompile"),
        _refused("curriculum_learning", "the curriculum is yours; change the data in your loop"),
        _refused("sparse_gradients", "gradients are reduced dense"),
        _refused("mlflow", "it is no logger here; log to MLflow in your loop, or by your trainer"),
        _refused("elasticity", "set the batch sizes; zero-launch --nnodes MIN:MAX keeps them with fewer nodes"),
        _refused("autotuning", "zero-plan compares stages, offloads and micro-batches instead; remove the block"),
        _no_effect("optimizer.legacy_fusion", "there is one fused update"),
        _refused("scheduler.params.last_batch_iteration", "a schedule starts at 0, or where its checkpoint says",
            off=(-1, None)),
    ],
    "activation_checkpointing.": [_no_effect("partition_activations contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile", "wrap blocks in torch.utils.checkpoint: the same results")],
    "zero_optimization.": [
        _fixed("contiguous_gradients", "gradients always go through contiguous buckets"),
        _fixed("reduce_scatter", "it is used wherever gradients are partitioned"),
        _fixed("use_multi_rank_bucket_allreduce", "one collective reduces each unit, always"),
        _fixed("allgather_partitions", "parameters are always gathered by all-gather"),
        _fixed("allgather_bucket_size", "gathers are sized by units; `units` chooses them"),
        _no_effect("compute_grad_norm", "the norm is always computed: it is also the test for overflow",
            off=(True, None)),
        _fixed("load_from_fp32_weights", "checkpoints hold the fp32 master"),
        _no_effect("elastic_checkpoint", "every checkpoint loads at any stage and world size"),
        _fixed("sub_group_size", "the update goes unit by unit"),
        _fixed("model_persistence_threshold stage3_model_persistence_threshold",
            "param_persistence_threshold alone decides"),
        _fixed("max_reuse_distance stage3_max_reuse_distance", "max_live_parameters alone bounds what stays gathered"),
        _no_effect("gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
                   "gather_fp16_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
            "engine.full_state_dict() gathers at every stage"),
        _no_effect("module_granularity_threshold stage3_module_granularity_threshold",
            "name modules in `units` to gather them whole", off=(0, None)),
        _no_effect("leaf_module", "name modules in `units` to gather them whole", switch=""),
        _no_effect("use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params",
            "gathers land in place, with nothing to concatenate"),
        _no_effect("allgather_sequential stage3_allgather_sequential",
            "gathers run ahead of their use and are issued unit by unit"),
        _fixed("ignore_unused_parameters", "parameters without a gradient are ordinary"),
        _no_effect("legacy_stage1", "there is one implementation of every stage"),
        _no_effect("round_robin_gradients", "ranks own equal shards of every unit already"),
        _no_effect("parameter_alignment", "parameters are always aligned in their unit's buffer"),
        _fixed("memory_efficient_linear", "linear layers are left alone; nothing of torch is patched"),
        _fixed("override_module_apply", "Module.apply is left alone; nothing of torch is patched"),
        _no_effect("pipeline_loading_checkpoint", _DS_FORMAT),
        _no_effect("log_trace_cache_warnings", "a wrong prefetch costs time only"),
        _no_effect("enable_sanity_checks", "ranks always check that they agree"),
        _no_effect("save_muon_momentum_buffer_in_memory", "Muon's state is never on NVMe"),
        _fixed("cpu_offload_use_pin_memory", 'write "pin_memory" in offload_optimizer'),
        _refused("cpu_offload", 'write "offload_optimizer": {"device": "cpu"}'),
        _refused("cpu_offload_param cpu_offload_params", 'write "offload_param": {"device": "cpu"}'),
        _fixed("offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.pipeline",
            "reads, update and writes always run beside one another"),
        _fixed("offload_optimizer.fast_init", "states are never written before the first step"),
        _fixed("offload_optimizer.cpuadam_cores_perc", "OMP_NUM_THREADS says how many cores the update takes"),
        _no_effect("offload_optimizer.super_offload", "the update runs beside the copies, piece by piece"),
        _fixed("offload_param.buffer_size", "a buffer fits the largest shard"),
        _fixed("offload_param.max_in_cpu", "offload_param.ratio says what stays in memory"),
        _refused("zenflow", "ZenFlow changes results", switch=""),
        _no_effect("mics_hierarchical_params_gather", "a degree of one machine gathers within it, and NCCL knows which "
            "ranks share a machine"),
    ],
    "optimizer.params.": [
        _fixed("set_grad_none", "gradients are dropped as they are reduced"),
        _no_effect("foreach fused", "there is one fused update"),
        _no_effect("capturable", "no CUDA graphs are captured"),
        _refused("differentiable", "the update is not differentiable"),
        _refused("maximize", "negate the loss instead"),
        _refused("amsgrad", "AMSGrad is not available"),
        _refused("bias_correction", "Adam's moments are always corrected; write true", off=(True, None)),
        _refused("fp32_optimizer_states", 'write "optimizer_state_dtype": "bf16" at the top level', off=(True, None)),
        _refused("max_grad_norm", 'write "gradient_clipping" at the top level instead', off=(0, None)),
    ],
}
# fmt: on
TABLE = {
    f"{prefix}{path}": replace(row, path=f"{prefix}{path}")
    for prefix, rows in _ROWS.items()
    for row in rows
    for path in row.path.split()
}


class KeySorter:
    """Separates one configuration's own keys from comments and from the keys in `TABLE`.

    Attributes:
        refused: Why each refused key is refused, by its path.
        notices: A sentence for each key that has no effect.
        comments: A sentence for each comment.
    """

    def __init__(self, source: ConfigSource) -> None:
        self._source = source
        self.refused: dict[KeyPath, str] = {}
        self.notices: list[str] = []
        self.comments: list[str] = []

    def sort(
        self, tree: dict[str, Any], path: KeyPath = (), table: Mapping[str, DeepSpeedKey] = TABLE
    ) -> dict[str, Any]:
        """Return the part of `tree`, which stands at `path`, that the models read; record the rest."""
        rest: dict[str, Any] = {}
        for key, value in tree.items():
            key_path = (*path, str(key))
            row = table.get(".".join(key_path))
            if key_path[-1].startswith(COMMENT_PREFIXES):
                self.comments.append(f"{self._source.label(key_path)} is ignored: it is a comment.")
            elif row is not None:
                # DeepSpeed ignores the other keys of a precision that is off, so refusing them would refuse working
                # files.
                if not is_disabled_precision(tree, path):
                    self._apply(row, key_path, value)
            elif isinstance(value, dict):
                # An imported class decides which parameters it takes.
                is_foreign = key_path == ("optimizer", "params") and is_import_path(tree.get("type"))
                rest[key] = self.sort(value, key_path, {} if is_foreign else table)
            else:
                rest[key] = value
        return rest

    def _apply(self, row: DeepSpeedKey, path: KeyPath, value: Any) -> None:
        """Record what `row` says of a key with this value."""
        # A key that asks for nothing is accepted silently, as files often list every key with its default.
        if row.is_off(value):
            return
        if row.status == "refused":
            # A block's value would be too long for the message.
            shown = "" if isinstance(value, dict) else f"the value {as_json(value) or 'given'} is "
            self.refused[path] = f"{shown}refused; {row.reason}."
        else:
            self.notices.append(f"{self._source.label(path)} has no effect: {row.reason}.")


def is_disabled_precision(tree: dict[str, Any], path: KeyPath) -> bool:
    """Tell whether `tree`, which stands at `path`, is a switched-off precision, whose other keys do not matter."""
    enabled = tree.get("enabled")
    return path in (("fp16",), ("bf16",), ("torch_autocast",)) and enabled in (None, False)
