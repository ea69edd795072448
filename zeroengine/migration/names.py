"""Tables of names of other libraries, and what to write instead of each. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DEEPSPEED, DDP, FSDP, FSDP2 = "DeepSpeed", "DistributedDataParallel", "FSDP", "FSDP2"


class Counterpart(NamedTuple):
    """What to write here instead of one name of another library.

    Attributes:
        text: The code to write instead, in backticks, and what differs; or why there is nothing to write.
        origin: The library that the name belongs to.
    """

    text: str
    origin: str

    @property
    def advice(self) -> str:
        """The sentence that ends an error message."""
        return f"{'Write ' if self.text.startswith('`') else ''}{self.text}."

    @property
    def clause(self) -> str:
        """The advice as the end of a sentence that has begun, without its full stop."""
        return f"{self.advice[0].lower()}{self.advice[1:-1]}"


def _by_name(tables: Mapping[str, Mapping[str, str]]) -> dict[str, Counterpart]:
    """Return each name's counterpart, from the texts of each library. Names with one text share a row."""
    return {
        name: Counterpart(text, origin)
        for origin, rows in tables.items()
        for names, text in rows.items()
        for name in names.split()
    }


_MEAN = "Leave it out: the mean over ranks and micro-steps is taken in the update"
_DATA_PARALLEL = (
    "Layers and experts are split by zeroengine.parallelize(model, size=2, expert_size=2), by the keys autotp_size and "
    "autoep_size, or by initialize(mpu=...); there is no pipeline parallelism"
)
_FORMAT = "There is one format of checkpoints, for every stage and number of ranks"
_EAGER = "Leave it out: torch.distributed is started where nobody has"
_IN_ORDER = "Leave it out: copies are ordered with the computation"
_DEVICE = "Move the model to its device before initialize(), or leave it on the CPU to be moved"
_NO_SYNC = "`with engine.no_sync():`; around all backwards but the last"
_OWN_DATA = "Data is your own: choose samples in the data set or its loader"
_RELEASED = '`"zero_optimization": {"stage": 3}` in the configuration; stage 2 keeps parameters gathered'
_SAVED = "`engine.save_checkpoint(directory)`; it holds the optimizer, loadable anywhere"
_EVERY_STAGE = "Leave it out: it is right at every stage"
_NO_INFERENCE = "`with torch.no_grad(), zeroengine.gathered(engine.module):`; there is no other inference"
_SECTION = "Pass the section as a dict to initialize(config=...)"

_ENGINE = {
    DEEPSPEED: {
        "train_batch_size": "`engine.config.train_batch_size`",
        "train_micro_batch_size_per_gpu": "`engine.config.train_micro_batch_size_per_gpu`",
        "gradient_accumulation_steps": "`engine.config.gradient_accumulation_steps`",
        "get_batch_info": "`engine.config.train_batch_size`; and its two factors, beside it in engine.config",
        "set_train_batch_size": "`engine.set_gradient_accumulation_steps(steps)`",
        "set_train_micro_batch_size": "Leave it out: a micro-batch may have any size",
        "zero_optimization": "`engine.config.zero_optimization.stage > 0`",
        "zero_optimization_stage": "`engine.config.zero_optimization.stage`",
        "zero_optimization_partition_gradients": "`engine.config.zero_optimization.stage >= 2`",
        "zero_optimization_partition_weights": "`engine.config.zero_optimization.stage == 3`",
        "fp16_enabled": "`engine.config.fp16.enabled`",
        "bfloat16_enabled": "`engine.config.bf16.enabled`",
        "torch_autocast_enabled": "`engine.config.torch_autocast.enabled`",
        "dynamic_loss_scale": "`engine.config.fp16.loss_scale == 0`",
        "get_lr": '`[group["lr"] for group in engine.optimizer.param_groups]`',
        "get_mom": '`[group["betas"] for group in engine.optimizer.param_groups]`',
        "get_global_grad_norm": "`engine.grad_norm`; of the last step's mean gradient, before clipping",
        "was_step_applied": "`updated = engine.step()`; its value says whether parameters were updated",
        "clip_fp32_gradients": "`engine.config.gradient_clipping`; step() clips by it",
        "allreduce_gradients buffered_allreduce_fallback": "Leave it out: backward() and step() reduce gradients",
        "coalesce_grad_reduction": "`engine.no_sync()`; the next backward outside of it reduces the sum",
        "global_rank get_data_parallel_rank": "`engine.rank`",
        "local_rank": "`engine.device`; or LOCAL_RANK of the environment",
        "dp_world_size": "`engine.num_sample_groups`",
        "mp_world_size expert_parallel_group get_model_parallel_rank get_tensor_parallel_rank": _DATA_PARALLEL,
        "get_sequence_parallel_group mpu has_moe_layers mesh_device": f"{_DATA_PARALLEL}: `engine.sequence_group`",
        "data_parallel_group seq_data_parallel_group": "`torch.distributed.group.WORLD`; or your process_group",
        "training_dataloader": "`loader = engine.dataloader(dataset)`; each rank's share, resumed with checkpoints",
        "deepspeed_io": "`engine.dataloader(dataset)`; each rank's share, resumed with checkpoints",
        "client_optimizer basic_optimizer": "`engine.optimizer`",
        "client_lr_scheduler": "`engine.lr_scheduler`",
        "optimizer_name": "`engine.config.optimizer.type`",
        "scheduler_name": "`engine.config.scheduler.type`",
        "global_samples": "`engine.global_steps * engine.config.train_batch_size`",
        "save_16bit_model": '`engine.save_weights(directory, dtype="bf16")`; safetensors, as Hugging Face loads them',
        "save_fp16_model": '`engine.save_weights(directory, dtype="fp16")`; safetensors, as Hugging Face loads them',
        "module_state_dict": "`engine.full_state_dict()`; on every rank; takes trainable_only=True, too",
        "load_module_state_dict": "`engine.load_weights(state_dict)`; on every rank",
        "empty_partition_cache": "Leave it out: a unit's parameters are released after each use",
        "destroy": "`engine.close()`",
        "is_compiled": "Leave it out: there is one engine, whether or not modules are compiled",
        "wall_clock_breakdown": "`engine.config.wall_clock_breakdown`; it prints the split of a step's time",
        "flops_profiler": '`"flops_profiler": {"enabled": true}` in the configuration',
        "timers tput_timer": '`"timers": {"throughput": {"enabled": true}}` in the configuration',
        "monitor": "`engine.log(name=value)`; the loggers of the configuration take it with the step",
        "memory_breakdown": "`engine.memory()`",
        "checkpoint_engine": _FORMAT,
        "managed_gradient_accumulation": '`"gradient_accumulation_steps": "manual"` in the configuration',
        "zero_cpu_offload": '`engine.config.zero_optimization.offload_optimizer.device == "cpu"`',
        "zero_use_cpu_optimizer": '`engine.config.zero_optimization.offload_optimizer.device == "cpu"`',
        "initial_dynamic_scale": "`2 ** engine.config.fp16.initial_scale_power`",
        "torch_autocast_dtype": "`engine.config.torch_autocast.dtype`",
        "optimizer_params": "`engine.config.optimizer.params`",
        "scheduler_params": "`engine.config.scheduler.params`",
        "aio_config": "`engine.config.aio`",
        "set_data_post_process_func": "`engine.dataloader(dataset, collate_fn=function)`",
    },
    "torch.nn.Module": {
        "state_dict": "`engine.full_state_dict()`; on every rank; engine.module's has released parameters at stage 3",
        "load_state_dict": "`engine.load_weights(state_dict)`; on every rank; it reaches the fp32 master",
        "training": "`engine.module.training`",
        "parameters": "`engine.module.parameters()`; they hold no gradients to clip: engine.clip_grad_norm_(max_norm)",
        "to cuda cpu float double half bfloat16 type": "Move or cast the model before initialize()",
    },
    DDP: {
        "require_backward_grad_sync": "`engine.no_sync()`; in a with statement",
        "register_comm_hook": '`"communication_data_type"` in the configuration; gradients are reduced in that dtype',
        "join": "`engine.dataloader(dataset)`; it gives every rank as many batches",
        "find_unused_parameters": "Leave it out: a parameter without a gradient is left alone",
    },
    FSDP: {
        "summon_full_params": "`with zeroengine.gathered(engine.module):`",
        "set_state_dict_type state_dict_type": "`engine.full_state_dict()`; or engine.save_checkpoint(directory)",
        "full_optim_state_dict optim_state_dict sharded_optim_state_dict": _SAVED,
        "optim_state_dict_to_load": "`engine.load_checkpoint(directory)`; it holds the optimizer, loadable anywhere",
    },
    FSDP2: {
        "set_requires_gradient_sync set_requires_all_reduce set_is_last_backward": _NO_SYNC,
        "unshard reshard": "`with zeroengine.gathered(engine.module):`; at its end parameters are released again",
        "set_reshard_after_forward set_reshard_after_backward": _RELEASED,
        "set_modules_to_forward_prefetch set_modules_to_backward_prefetch": "Leave it out: the order is learned",
        "set_unshard_in_backward": "Leave it out: backward gathers what it reads",
        "set_gradient_divide_factor set_gradient_reduce_divide_factor": _MEAN,
    },
}
ENGINE = _by_name(_ENGINE)
# Prefixes of DeepSpeed's other attributes.
ENGINE_PREFIXES = {
    "autotuning_": "Stages, offloads and micro-batches are compared by zero-plan, or zeroengine.plan(model)",
    **dict.fromkeys(("curriculum_", "data_efficiency_", "data_sampling_", "set_custom_curriculum_"), _OWN_DATA),
    "random_ltd_": "Layers are your own: drop tokens in the model",
    "flops_profiler_": "`engine.config.flops_profiler`",
    **dict.fromkeys(("expert_", "moe_", "seq_", "sequence_", "tensor_parallel_", "pipeline_"), _DATA_PARALLEL),
    "sparse_": "Gradients are dense: write torch.nn.Embedding(..., sparse=False)",
    "checkpoint_": _FORMAT,
}

_ARGUMENTS = {
    DEEPSPEED: {
        "initialize": {
            "args": "`config=args.deepspeed_config`; the arguments of the command line are your own",
            "config_params": "`config=...`",
            "model_parameters": "`optimizer=torch.optim.AdamW(model_parameters, lr=1e-4)`; or leave it out",
            "training_data": "`engine.dataloader(training_data)`; after initialize()",
            "collate_fn": "`engine.dataloader(dataset, collate_fn=collate_fn)`; after initialize()",
            "mesh_param": '`process_group=mesh["dp"]`; the data-parallel dimension of a DeviceMesh',
            "dist_init_required": _EAGER,
            "distributed_port": "Set MASTER_PORT, or start with zero-launch --port",
        },
        "backward": {
            "scale_wrt_gas": _MEAN,
            "allreduce_gradients": _NO_SYNC,
            "release_loss": "Leave it out: the loss is yours",
            "gradient": "`engine.scale(loss).backward(gradient)`; engine.backward() takes a scalar loss",
        },
        "step": {"lr_kwargs": "Leave it out: a schedule is stepped without arguments"},
        "save_checkpoint": {
            "save_dir": "`directory=...`",
            "save_latest": "Leave it out: a checkpoint is whole, and `latest` names the newest",
            "exclude_frozen_parameters": "`frozen=False`; where it is True",
        },
        "load_checkpoint": {
            "load_dir": "`directory=...`",
            "load_module_strict": "`strict=...`",
            "load_module_only": "`weights_only=...`",
            "load_optimizer_states": "`optimizer=...`",
            "load_lr_scheduler_states": "`weights_only=True`; for the weights alone; otherwise the schedule is loaded",
            "custom_load_fn": "`engine.load_weights(state_dict)`; with a state dict that you made",
        },
        "offload_states": {
            "pin_memory": "Leave it out: memory of the CPU is taken for as long as the states are there",
            "non_blocking": _IN_ORDER,
        },
        "reload_states": {"non_blocking": _IN_ORDER},
        "gathered": {
            "params": "`zeroengine.gathered(params)`; without its name",
            "modifier_rank": "Leave it out: what any rank writes is kept, of several the lowest's",
            "fwd_module": "Leave it out: a parameter belongs to every module that uses it",
            "enabled": _EVERY_STAGE,
        },
        "meta_init": {
            "module": "Leave it out: a model that is built already is passed to initialize()",
            "config_dict_or_path": "`config=...`",
            "data_parallel_group": "`zeroengine.initialize(..., process_group=...)`",
            "dtype": '`"bf16": {"enabled": true}` in the configuration',
            "remote_device": '`"zero_optimization": {"offload_param": {...}}` in the configuration',
            "mem_efficient_linear": "Leave it out: torch.nn.functional.linear is never replaced",
            "enabled": _EVERY_STAGE,
            "pin_memory param_swapper": "Leave it out: memory follows from the configuration",
            "sequence_data_parallel_group zero_param_parallel_group": _DATA_PARALLEL,
        },
    },
    DDP: {
        "initialize": {
            "device_ids output_device": _DEVICE,
            "find_unused_parameters": "Leave it out: a parameter without a gradient is left alone",
            "static_graph": "Leave it out: any graph may follow another",
            "gradient_as_bucket_view": "Leave it out: gradients are written into buckets and dropped",
            "broadcast_buffers": "Leave it out: all start with rank 0's, and each rank goes on with its own",
            "bucket_cap_mb": '`"zero_optimization": {"reduce_bucket_size": ...}` in the configuration; in elements',
        },
    },
    FSDP: {
        "initialize": {
            "mesh device_mesh": '`process_group=mesh["dp"]`; a DeviceMesh of one dimension',
            "device_id": _DEVICE,
            "auto_wrap_policy": '`"units": ["layers.*"]` in the configuration; or leave it out',
            "sharding_strategy": '`"zero_optimization": {"stage": 3}` in the configuration',
            "reshard_after_forward": _RELEASED,
            "mixed_precision mp_policy": '`"bf16": {"enabled": true}` in the configuration',
            "cpu_offload offload_policy": (
                '`"zero_optimization": {"offload_optimizer": {"device": "cpu"}}` in the configuration'
            ),
            "use_orig_params": "Leave it out: parameters stay the model's own",
            "sync_module_states": "Leave it out: rank 0's values are taken",
            "param_init_fn": "`with zeroengine.meta_init():`; around the building of the model",
        },
    },
    "torch.optim": {
        "step": {"closure": "`engine.step()`; no optimizer that calls a closure can be partitioned"},
    },
}
# The arguments of other libraries, by the function that lacks them.
ARGUMENTS = {
    function: _by_name({origin: calls[function] for origin, calls in _ARGUMENTS.items() if function in calls})
    for function in _ARGUMENTS[DEEPSPEED]
}

# What can be imported from ``zeroengine.integrations.deepspeed`` so that scripts start, and says this where it is used.
_NOT_SERVED = {
    "LayerSpec MoE PipelineEngine PipelineModule TiedLayerSpec tp_model_init": _DATA_PARALLEL,
    "DeepSpeedHybridEngine InferenceEngine init_inference": _NO_INFERENCE,
    "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig": _SECTION,
    "BF16_Optimizer FP16_Optimizer FP16_UnfusedOptimizer": "initialize() makes the optimizer of every precision",
    "FusedLamb": "Pass a LAMB of another package to initialize(), which runs at every stage",
    "TiledLinear TiledLinearReturnBias": 'Write several torch.nn.Linear, each of which can be one of the "units"',
    "OnebitAdam OnebitLamb ZeroOneAdam": "It compresses its communication, which changes results; use Adam",
    "get_model_ckpt_name_for_rank": f"{_FORMAT}; read its weights with zero_to_fp32, or export them with zero-export",
}
NOT_SERVED = _by_name({DEEPSPEED: _NOT_SERVED})

_MODULE = {
    DEEPSPEED: {
        "zero": "`zeroengine.gathered(...)`; it is zero.GatheredParameters, and zeroengine.meta_init() is zero.Init",
        "GatheredParameters": "`zeroengine.gathered(...)`",
        "Init OnDevice": "`zeroengine.meta_init()`",
        "register_external_parameter": "Leave it out: a parameter is gathered wherever it is used",
        "init_distributed": _EAGER,
        "add_config_arguments": "Leave it out: zero-launch --config FILE and --set KEY=VALUE reach initialize()",
        "get_accelerator": "`torch.accelerator.current_accelerator()`; or engine.device",
        "checkpointing": "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`",
        "DeepSpeedEngine": "`zeroengine.Engine`",
        "DeepSpeedConfig": "`zeroengine.config.load(file)`",
        "DeepSpeedOptimizer": "`torch.optim.Optimizer`",
        "DeepSpeedCPUAdam FusedAdam CPUAdam": "`torch.optim.AdamW(...)`; initialize() runs it on the fused kernel",
        "pipe moe": _DATA_PARALLEL,
        "dist": "`torch.distributed`",
        "log_dist logger": '`logging.getLogger("zeroengine")`',
    },
    DDP: {"DistributedDataParallel": "`zeroengine.initialize(model, optimizer, config)`"},
    FSDP: {"FullyShardedDataParallel": "`zeroengine.initialize(model, optimizer, config)`"},
    FSDP2: {"fully_shard": "`zeroengine.initialize(model, optimizer, config)`"},
}
MODULE = _by_name(_MODULE) | NOT_SERVED

UNPACKED_ENGINE = (
    "initialize() returns the engine alone, and here it is unpacked or indexed as DeepSpeed's (engine, optimizer, "
    "training_dataloader, lr_scheduler). Write: engine = zeroengine.initialize(model, optimizer, config). The others "
    "are engine.optimizer, engine.dataloader(dataset) and engine.lr_scheduler"
)
UNPACKED_CLIENT_STATE = (
    "load_checkpoint() returns the client state alone, and here it is unpacked as DeepSpeed's (path, client_state). "
    "Write: client_state = engine.load_checkpoint(directory)"
)
