"""DeepSpeed's keys that are not fields of our models, and the fate of each.

Every key that DeepSpeed 0.19 reads is a field of `model.py` (honoured) or has a row here, or its block has one:

- NO_EFFECT: accepted, and a notice says why it changes nothing here.
- REFUSED: an error that says why; it would change results, or the user relies on what we do not have.

A row is silent where its value asks for nothing: "auto", one of `off`, or a block that is empty or switched off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

NO_EFFECT: Literal["no effect"] = "no effect"
REFUSED: Literal["refused"] = "refused"


@dataclass(frozen=True)
class Row:
    path: str
    fate: Literal["no effect", "refused"]
    why: str
    off: tuple[Any, ...] = (False, None)
    keys: str = ""  # of a block: the keys that it may have; "" leaves them unchecked
    switch: str = "enabled"  # of a block: the key that turns it on, off where absent; "" where it is always on

    def is_off(self, value: Any) -> bool:
        """Whether the value asks for nothing: off, an empty block, or a block whose switch is off."""
        if isinstance(value, dict) and value:
            return bool(self.switch) and value.get(self.switch) in OFF
        return value in ("auto", {}) or any(value == off and type(value) in (type(off), float) for off in self.off)


OFF = (False, None, 0, "none", "auto")

# Old or second spellings of keys that we honour: canonical path by written path.
ALIASES = {
    "bfloat16": "bf16",
    "bf16.check_grad_overflow": "check_grad_overflow",
    "bf16.check_overflow": "check_grad_overflow",
    "zero_optimization.stage3_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "zero_optimization.max_live_parameters",
}

_ALWAYS = (None,)  # false asks for something too
_DS_FORMAT = "checkpoints here are torch Distributed Checkpoints, one format for every stage and world size"
_METRICS = "nothing is sent to loggers; log the loss, engine.grad_norm and engine.lr_scheduler's rate from your loop"
_STREAMED = "reads, update and writes always run beside one another"
_REMOVED = "DeepSpeed itself removed it, and it is not available here"
_PIPELINED = "gathers run ahead of their use and are issued unit by unit"

# fmt: off
TOP = [
    Row("wall_clock_breakdown", NO_EFFECT, "there are no built-in timers; use torch.profiler"),
    Row("memory_breakdown", NO_EFFECT, "call engine.memory() for the bytes of every state"),
    Row("timers", NO_EFFECT, "there are no built-in timers; use torch.profiler", keys="throughput", switch=""),
    Row("flops_profiler", NO_EFFECT, "there is no built-in profiler; use torch.profiler",
        keys="enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor"),
    Row("comms_logger", NO_EFFECT, "collectives are not logged; use torch.profiler",
        keys="enabled verbose prof_all debug prof_ops"),
    Row("tensorboard", NO_EFFECT, _METRICS, keys="enabled output_path job_name"),
    Row("wandb", NO_EFFECT, _METRICS, keys="enabled group team project"),
    Row("csv_monitor", NO_EFFECT, _METRICS, keys="enabled output_path job_name"),
    Row("comet", NO_EFFECT, _METRICS,
        keys="enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"),
    Row("log_level", NO_EFFECT, "set the level of Python's logger \"zeroengine\""),
    Row("vocabulary_size", NO_EFFECT, "DeepSpeed only warns about its alignment"),
    Row("dataloader_drop_last", NO_EFFECT, "no data loader is made; set drop_last on your own"),
    Row("disable_allgather", NO_EFFECT, "updated parameters are always gathered"),
    Row("disable_python_gc", NO_EFFECT, "the garbage collector is yours; call gc.disable()"),
    Row("zero_allow_untested_optimizer", NO_EFFECT, "every element-wise torch optimizer is allowed"),
    Row("zero_force_ds_cpu_optimizer", NO_EFFECT, "the update runs where the optimizer state lives"),
    Row("allgather_size", NO_EFFECT, "gathers are sized by units", off=_ALWAYS),
    Row("use_data_before_expert_parallelism", NO_EFFECT, "there is no expert parallelism"),
    Row("seq_parallel_communication_data_type", NO_EFFECT, "there is no sequence parallelism", off=_ALWAYS),
    Row("graph_harvesting", NO_EFFECT, "no CUDA graphs are captured; the numbers are the same"),
    *(Row(f"aio.{key}", NO_EFFECT, why, off=off) for key, why, off in (
        ("intra_op_parallelism", "one queue of queue_depth requests serves a rank", (1, None)),
        ("thread_count", "one queue of queue_depth requests serves a rank", (1, None)),
        ("single_submit", "requests are submitted as the queue has room", _ALWAYS),
        ("overlap_events", "requests are always under way together", _ALWAYS),
        ("use_gds", "states go through CPU memory", (False, None)))),
    Row("activation_checkpointing", NO_EFFECT, "wrap blocks in torch.utils.checkpoint; results are the same",
        keys="partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints "
             "synchronize_checkpoint_boundary profile", switch=""),
    Row("checkpoint.tag_validation", NO_EFFECT, "a checkpoint is whole or absent on every rank", off=_ALWAYS),
    Row("checkpoint.load_universal", NO_EFFECT, "every checkpoint loads at any stage and world size"),
    Row("checkpoint.use_node_local_storage", REFUSED, "a checkpoint is one directory that all ranks see"),
    Row("checkpoint.parallel_write", NO_EFFECT, "all ranks write their own shards, always", keys="pipeline_stage",
        switch=""),
    Row("checkpoint.checkpoint_serialization", NO_EFFECT, _DS_FORMAT, off=_ALWAYS),
    Row("checkpoint.writer", NO_EFFECT, _DS_FORMAT,
        keys="type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier", switch=""),
    Row("datastates_ckpt", NO_EFFECT, _DS_FORMAT, switch=""),
    Row("nebula", REFUSED, _REMOVED),
    Row("fp16.auto_cast", NO_EFFECT, "floating inputs are always cast", off=_ALWAYS),
    Row("fp16.fp16_master_weights_and_grads", REFUSED, "the master weights are fp32"),
    Row("bf16.immediate_grad_update", NO_EFFECT, "gradients are always reduced as they are produced"),
    Row("bf16.bf16_master_weights_and_grads", REFUSED, "the master weights are fp32"),
    Row("bf16.bf16_optimizer_states", REFUSED, 'write "optimizer_state_dtype": "bf16" at the top level'),
    Row("torch_autocast.lower_precision_safe_modules", NO_EFFECT,
        "torch.autocast's own lists decide operation by operation; communication_data_type is that of reductions",
        off=_ALWAYS),
    Row("amp", REFUSED, "Apex is not supported; use bf16"),
    Row("data_types.param_dtype", REFUSED, "use bf16 to choose the compute dtype", off=_ALWAYS),
    Row("data_types.keep_in_fp32_modules", NO_EFFECT,
        "buffers keep their dtype unless buffer_dtype is given; keep_fp32_modules keeps whole modules in fp32",
        off=([], None)),
    Row("gradient_allreduce_op", REFUSED, 'gradients are averaged; multiply the loss instead, and write "mean"',
        off=(None, "mean", "MEAN", "Mean")),
    Row("managed_gradient_accumulation", REFUSED, "step() acts on the boundary; write true", off=(True, None)),
    Row("sequence_parallel_size", REFUSED, "there is no sequence parallelism", off=(1, None)),
    Row("tensor_parallel", REFUSED, "there is no tensor parallelism; ranks are data-parallel only",
        switch="autotp_size"),
    Row("expert_parallel", REFUSED, "there is no expert parallelism; ranks are data-parallel only"),
    Row("pipeline", REFUSED, "there is no pipeline parallelism; ranks are data-parallel only", switch=""),
    Row("hybrid_engine", REFUSED, "there is no inference engine; generate inside zeroengine.gathered(model)"),
    Row("weight_quantization", REFUSED, "weights are not quantized", switch=""),
    Row("compression_training", REFUSED, _REMOVED, switch=""),
    Row("quantize_training", REFUSED, _REMOVED),
    Row("data_efficiency", REFUSED, "data sampling and routing are yours; do them in your data loader and model"),
    Row("curriculum_learning", REFUSED, "the curriculum is yours; change the data in your loop"),
    Row("progressive_layer_drop", REFUSED, _REMOVED),
    Row("sparse_attention", REFUSED, _REMOVED),
    Row("sparse_gradients", REFUSED, "gradients are reduced dense"),
    Row("eigenvalue", REFUSED, _REMOVED),
    Row("elasticity", REFUSED, "set the batch sizes directly; a checkpoint loads at any world size"),
    Row("autotuning", REFUSED, "there is no autotuner; remove the block"),
    Row("compile.deepcompile", REFUSED, "use torch.compile on the model's blocks"),
    Row("compile.autoep_non_moe", NO_EFFECT, "there is no expert parallelism"),
    *(Row(f"compile.{key}", NO_EFFECT, "only DeepCompile reads it", off=(False, True, None)) for key in (
        "free_activation free_activation_threshold offload_activation offload_activation_pin_memory offload_opt_states "
        "double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce "
        "sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes").split()),
]

ZERO = [
    Row("contiguous_gradients", NO_EFFECT, "gradients always go through contiguous buckets", off=_ALWAYS),
    Row("reduce_scatter", NO_EFFECT, "the degrees of the stage decide: reduce-scatter where gradients are partitioned",
        off=_ALWAYS),
    Row("use_multi_rank_bucket_allreduce", NO_EFFECT, "one collective reduces a whole bucket, always", off=_ALWAYS),
    Row("allgather_partitions", NO_EFFECT, "parameters are always gathered by all-gather", off=_ALWAYS),
    Row("allgather_bucket_size", NO_EFFECT, "gathers are sized by units; `units` chooses them", off=_ALWAYS),
    Row("compute_grad_norm", NO_EFFECT, "the norm is always computed: it is also the test for overflow",
        off=(True, None)),
    Row("load_from_fp32_weights", NO_EFFECT, "checkpoints hold the fp32 master", off=_ALWAYS),
    Row("elastic_checkpoint", NO_EFFECT, "every checkpoint loads at any stage and world size"),
    Row("sub_group_size", NO_EFFECT, "the update goes unit by unit", off=_ALWAYS),
    Row("model_persistence_threshold", NO_EFFECT, "param_persistence_threshold alone decides", off=_ALWAYS),
    Row("max_reuse_distance", NO_EFFECT, "max_live_parameters alone bounds what stays gathered", off=_ALWAYS),
    Row("gather_16bit_weights_on_model_save", NO_EFFECT, "engine.full_state_dict() gathers at every stage"),
    Row("gather_fp16_weights_on_model_save", NO_EFFECT, "engine.full_state_dict() gathers at every stage"),
    Row("module_granularity_threshold", NO_EFFECT, "name modules in `units` to gather them whole", off=(0, None)),
    Row("leaf_module", NO_EFFECT, "name modules in `units` to gather them whole", keys="classes names name_suffixes",
        switch=""),
    Row("use_all_reduce_for_fetch_params", NO_EFFECT, "gathers land in place, with nothing to concatenate"),
    Row("allgather_sequential", NO_EFFECT, _PIPELINED),
    Row("ignore_unused_parameters", NO_EFFECT, "parameters without a gradient are ordinary", off=_ALWAYS),
    Row("legacy_stage1", NO_EFFECT, "there is one implementation of every stage"),
    Row("round_robin_gradients", NO_EFFECT, "ranks own equal shards of every bucket already"),
    Row("parameter_alignment", NO_EFFECT, "parameters are always aligned in their unit's buffer"),
    Row("memory_efficient_linear", NO_EFFECT, "linear layers are left alone; nothing of torch is patched", off=_ALWAYS),
    Row("override_module_apply", NO_EFFECT, "Module.apply is left alone; nothing of torch is patched", off=_ALWAYS),
    Row("pipeline_loading_checkpoint", NO_EFFECT, _DS_FORMAT),
    Row("log_trace_cache_warnings", NO_EFFECT, "a wrong prefetch costs time only"),
    Row("enable_sanity_checks", NO_EFFECT, "ranks always check that they agree"),
    Row("save_muon_momentum_buffer_in_memory", NO_EFFECT, "Muon's state is never on NVMe"),
    Row("cpu_offload_use_pin_memory", NO_EFFECT, 'write "pin_memory" in offload_optimizer', off=_ALWAYS),
    Row("cpu_offload", REFUSED, 'write "offload_optimizer": {"device": "cpu"}'),
    Row("cpu_offload_param", REFUSED, 'write "offload_param": {"device": "cpu"}'),
    Row("cpu_offload_params", REFUSED, 'write "offload_param": {"device": "cpu"}'),
    *(Row(f"offload_optimizer.{key}", NO_EFFECT, why, off=_ALWAYS) for key, why in (
        ("pipeline_read", _STREAMED),
        ("pipeline_write", _STREAMED),
        ("pipeline", _STREAMED),
        ("fast_init", "states are never written before the first step"),
        ("cpuadam_cores_perc", "OMP_NUM_THREADS says how many cores the update takes"))),
    Row("offload_optimizer.super_offload", NO_EFFECT, "the update runs beside the copies, piece by piece"),
    Row("offload_param.buffer_size", NO_EFFECT, "a buffer fits the largest shard", off=_ALWAYS),
    Row("offload_param.max_in_cpu", NO_EFFECT, "max_live_parameters bounds what is in memory", off=_ALWAYS),
    Row("zenflow", REFUSED, "ZenFlow changes results", switch=""),
    Row("zero_hpz_partition_size", REFUSED, "a secondary partition (ZeRO++ hpZ) is not available yet; write 1",
        off=(0, 1, None)),
    Row("zero_quantized_weights", REFUSED, "it changes results: gathers are exact"),
    Row("zero_quantized_nontrainable_weights", REFUSED, "it changes results: parameters are kept exactly"),
    Row("zero_quantized_gradients", REFUSED, "it changes results: reductions are exact"),
    Row("zeropp_loco_param", REFUSED, "it changes results: reductions are exact", switch=""),
    Row("mics_shard_size", REFUSED, "partitioning over part of the ranks (MiCS) is not available yet", off=(-1, None)),
    Row("mics_hierarchical_params_gather", REFUSED, "partitioning over part of the ranks (MiCS) is not available yet"),
]

OPTIMIZER = [
    Row("optimizer.legacy_fusion", NO_EFFECT, "there is one fused update"),
    Row("optimizer.params.torch_adam", NO_EFFECT, "the fused update computes the same as torch's"),
    Row("optimizer.params.set_grad_none", NO_EFFECT, "gradients are dropped as they are reduced", off=_ALWAYS),
    Row("optimizer.params.foreach", NO_EFFECT, "there is one fused update"),
    Row("optimizer.params.fused", NO_EFFECT, "there is one fused update"),
    Row("optimizer.params.capturable", NO_EFFECT, "no CUDA graphs are captured"),
    Row("optimizer.params.differentiable", REFUSED, "the update is not differentiable"),
    Row("optimizer.params.maximize", REFUSED, "negate the loss instead"),
    Row("optimizer.params.amsgrad", REFUSED, "AMSGrad is not available"),
    Row("optimizer.params.bias_correction", REFUSED, "Adam's moments are always corrected; write true",
        off=(True, None)),
    Row("optimizer.params.fp32_optimizer_states", REFUSED, 'write "optimizer_state_dtype": "bf16" at the top level',
        off=(True, None)),
    Row("optimizer.params.max_grad_norm", REFUSED, 'write "gradient_clipping" at the top level instead', off=(0, None)),
    Row("scheduler.params.last_batch_iteration", REFUSED, "a schedule starts at 0, or where its checkpoint says",
        off=(-1, None)),
]
# fmt: on


def _zero_rows() -> list[Row]:
    """DeepSpeed reads some of the keys under a stage3_ name as well."""
    twice = (
        "model_persistence_threshold",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
    return [
        replace(row, path=f"zero_optimization.{prefix}{row.path}")
        for row in ZERO
        for prefix in (("", "stage3_") if row.path in twice else ("",))
    ]


TABLE: dict[str, Row] = {row.path: row for row in (*TOP, *_zero_rows(), *OPTIMIZER)}
BLOCKS = ("compile",)  # objects that hold nothing but rows
