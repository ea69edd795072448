"""Tables of names of other libraries, and what to write instead of each. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEEPSPEED, DDP, FSDP, FSDP2 = "DeepSpeed", "DistributedDataParallel", "FSDP", "FSDP2"
# The end of `Counterpart.write` where it is a key of the configuration and not code.
IN_THE_CONFIGURATION = " in the configuration"
OPTIMIZER_GROUPS = "engine.optimizer.param_groups"


@dataclass(frozen=True)
class Counterpart:
    """What to write here instead of one name of another library.

    Attributes:
        write: The expression or argument to write instead; empty where there is none.
        note: What differs, or why there is nothing to write.
        origin: The library that the name belongs to.
    """

    write: str
    note: str = ""
    origin: str = DEEPSPEED

    @property
    def line(self) -> str:
        """What to write, in backticks, and the note, for a table."""
        code, place, _ = self.write.partition(IN_THE_CONFIGURATION)
        return f"`{code}`{place}" + (f"; {self.note}" if self.note else "") if code else self.note

    @property
    def advice(self) -> str:
        """The sentence that ends an error message."""
        return f"{'Write ' if self.write else ''}{self.line}."


def _counterparts(origin: str, rows: Mapping[str, tuple[str, str]]) -> dict[str, Counterpart]:
    return {name: Counterpart(write, note, origin) for name, (write, note) in rows.items()}


_MEAN = "Leave it out: the mean over ranks and micro-steps is taken in the update"
_REDUCED = "Leave it out: backward() and step() reduce gradients"
_RELEASED = "Leave it out: a unit's parameters are released after each use"
_DATA_PARALLEL = "There is data parallelism alone, without tensor, pipeline, sequence or expert parallelism"
_PROFILER = "Use torch.profiler: units and collectives are labelled in its traces"
_PREFETCH = '"zero_optimization": {"prefetch_bucket_size": ...} in the configuration'
_STAGE = '"zero_optimization": {"stage": 3} in the configuration'
_FORMAT = "There is one format of checkpoints, for every stage and number of ranks"

ENGINE = _counterparts(
    DEEPSPEED,
    {
        "train_batch_size": ("engine.config.train_batch_size", ""),
        "train_micro_batch_size_per_gpu": ("engine.config.train_micro_batch_size_per_gpu", ""),
        "gradient_accumulation_steps": ("engine.config.gradient_accumulation_steps", ""),
        "get_batch_info": ("engine.config.train_batch_size", "and its two factors, beside it in engine.config"),
        "set_train_batch_size": (
            '"gradient_accumulation_steps": "manual" in the configuration',
            "each call of step() then ends a step, after as many backwards as you made",
        ),
        "set_train_micro_batch_size": ("", "Leave it out: a micro-batch may have any size"),
        "zero_optimization": ("engine.config.zero_optimization.stage > 0", ""),
        "zero_optimization_stage": ("engine.config.zero_optimization.stage", ""),
        "zero_optimization_partition_gradients": ("engine.config.zero_optimization.stage >= 2", ""),
        "zero_optimization_partition_weights": ("engine.config.zero_optimization.stage == 3", ""),
        "fp16_enabled": ("engine.config.fp16.enabled", ""),
        "bfloat16_enabled": ("engine.config.bf16.enabled", ""),
        "torch_autocast_enabled": ("engine.config.torch_autocast.enabled", ""),
        "dynamic_loss_scale": ("engine.config.fp16.loss_scale == 0", ""),
        "get_lr": (f'[group["lr"] for group in {OPTIMIZER_GROUPS}]', ""),
        "get_mom": (f'[group["betas"] for group in {OPTIMIZER_GROUPS}]', ""),
        "get_global_grad_norm": ("engine.grad_norm", "of the last step's mean gradient, before clipping"),
        "was_step_applied": ("updated = engine.step()", "its value says whether parameters were updated"),
        "clip_fp32_gradients": ("engine.config.gradient_clipping", "step() clips by it"),
        "allreduce_gradients": ("", _REDUCED),
        "buffered_allreduce_fallback": ("", _REDUCED),
        "coalesce_grad_reduction": ("engine.no_sync()", "the next backward outside of it reduces the sum"),
        "global_rank": ("engine.rank", ""),
        "local_rank": ("engine.device", "or LOCAL_RANK of the environment"),
        "dp_world_size": ("engine.world_size", ""),
        "mp_world_size": ("", _DATA_PARALLEL),
        "data_parallel_group": ("torch.distributed.group.WORLD", "or what you passed as process_group"),
        "seq_data_parallel_group": ("torch.distributed.group.WORLD", "or what you passed as process_group"),
        "expert_parallel_group": ("", _DATA_PARALLEL),
        "get_data_parallel_rank": ("engine.rank", ""),
        "get_model_parallel_rank": ("", _DATA_PARALLEL),
        "get_tensor_parallel_rank": ("", _DATA_PARALLEL),
        "get_sequence_parallel_group": ("", _DATA_PARALLEL),
        "mpu": ("", _DATA_PARALLEL),
        "has_moe_layers": ("", _DATA_PARALLEL),
        "training_dataloader": ("loader = engine.dataloader(dataset)", "each rank's share, resumed with checkpoints"),
        "deepspeed_io": ("engine.dataloader(dataset)", "each rank's share, resumed with checkpoints"),
        "client_optimizer": ("engine.optimizer", ""),
        "basic_optimizer": ("engine.optimizer", ""),
        "client_lr_scheduler": ("engine.lr_scheduler", ""),
        "optimizer_name": ("engine.config.optimizer.type", ""),
        "scheduler_name": ("engine.config.scheduler.type", ""),
        "global_samples": ("engine.global_steps * engine.config.train_batch_size", ""),
        "save_16bit_model": ('engine.save_weights(directory, dtype="bf16")', "safetensors, as Hugging Face loads them"),
        "save_fp16_model": ('engine.save_weights(directory, dtype="fp16")', "safetensors, as Hugging Face loads them"),
        "module_state_dict": ("engine.full_state_dict()", "on every rank"),
        "load_module_state_dict": ("engine.load_weights(state_dict)", "on every rank"),
        "empty_partition_cache": ("", _RELEASED),
        "destroy": ("engine.close()", ""),
        "is_compiled": ("", "Leave it out: there is one engine, whether or not modules are compiled"),
        "wall_clock_breakdown": ("", _PROFILER),
        "flops_profiler": ("", _PROFILER),
        "timers": ("", _PROFILER),
        "tput_timer": ("", _PROFILER),
        "monitor": ("", "Log engine.grad_norm, engine.loss_scale and your losses with a logger of your own"),
        "memory_breakdown": ("engine.memory()", ""),
        "checkpoint_engine": ("", _FORMAT),
        "managed_gradient_accumulation": ('"gradient_accumulation_steps": "manual" in the configuration', ""),
        "zero_cpu_offload": ('engine.config.zero_optimization.offload_optimizer.device == "cpu"', ""),
        "zero_use_cpu_optimizer": ('engine.config.zero_optimization.offload_optimizer.device == "cpu"', ""),
        "initial_dynamic_scale": ("2 ** engine.config.fp16.initial_scale_power", ""),
        "torch_autocast_dtype": ("engine.config.torch_autocast.dtype", ""),
        "optimizer_params": ("engine.config.optimizer.params", ""),
        "scheduler_params": ("engine.config.scheduler.params", ""),
        "aio_config": ("engine.config.aio", ""),
        "mesh_device": ("", _DATA_PARALLEL),
        "set_data_post_process_func": ("engine.dataloader(dataset, collate_fn=function)", ""),
    },
)
ENGINE |= _counterparts(
    "torch.nn.Module",
    {
        "state_dict": ("engine.full_state_dict()", "on every rank; engine.module's has released parameters at stage 3"),
        "load_state_dict": ("engine.load_weights(state_dict)", "on every rank; it reaches the fp32 master"),
        "training": ("engine.module.training", ""),
        **{
            name: ("", "Move or cast the model before initialize(); precision is the configuration's, such as bf16")
            for name in ("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "type")
        },
    },
)
ENGINE |= _counterparts(
    DDP,
    {
        "require_backward_grad_sync": ("engine.no_sync()", "in a with statement"),
        "register_comm_hook": ('"communication_data_type" in the configuration', "gradients are reduced in that dtype"),
        "join": ("engine.dataloader(dataset)", "it gives every rank as many batches"),
        "find_unused_parameters": ("", "Leave it out: a parameter without a gradient is left alone"),
    },
)
ENGINE |= _counterparts(
    FSDP,
    {
        "summon_full_params": ("with zeroengine.gathered(engine.module):", ""),
        "set_state_dict_type": ("engine.full_state_dict()", "or engine.save_checkpoint(directory)"),
        "state_dict_type": ("engine.full_state_dict()", "or engine.save_checkpoint(directory)"),
        "full_optim_state_dict": ("engine.save_checkpoint(directory)", "it holds the optimizer, loadable anywhere"),
        "optim_state_dict": ("engine.save_checkpoint(directory)", "it holds the optimizer, loadable anywhere"),
        "sharded_optim_state_dict": ("engine.save_checkpoint(directory)", "it holds the optimizer, loadable anywhere"),
        "optim_state_dict_to_load": ("engine.load_checkpoint(directory)", "it holds the optimizer, loadable anywhere"),
    },
)
ENGINE |= _counterparts(
    FSDP2,
    {
        "set_requires_gradient_sync": ("with engine.no_sync():", "around the backwards that keep their gradients"),
        "set_is_last_backward": ("with engine.no_sync():", "around all backwards but the last"),
        "set_requires_all_reduce": ("with engine.no_sync():", "around the backwards that keep their gradients"),
        "unshard": ("with zeroengine.gathered(engine.module):", "at its end parameters are released again"),
        "reshard": ("with zeroengine.gathered(engine.module):", "at its end parameters are released again"),
        "set_reshard_after_forward": (_STAGE, "stage 2 keeps parameters gathered"),
        "set_reshard_after_backward": (_STAGE, "stage 2 keeps parameters gathered"),
        "set_modules_to_forward_prefetch": (_PREFETCH, "the order of use is learned"),
        "set_modules_to_backward_prefetch": (_PREFETCH, "the order of use is learned"),
        "set_unshard_in_backward": ("", "Leave it out: backward gathers what it reads"),
        "set_gradient_divide_factor": ("", _MEAN),
        "set_gradient_reduce_divide_factor": ("", _MEAN),
    },
)
# Prefixes of DeepSpeed's other attributes.
ENGINE_PREFIXES = {
    "autotuning_": "There is no tuner: try stages and sizes with zero-launch --set",
    "curriculum_": "Data is your own: choose samples in the data set or its loader",
    "data_efficiency_": "Data is your own: choose samples in the data set or its loader",
    "data_sampling_": "Data is your own: choose samples in the data set or its loader",
    "set_custom_curriculum_": "Data is your own: choose samples in the data set or its loader",
    "random_ltd_": "Layers are your own: drop tokens in the model",
    "flops_profiler_": _PROFILER,
    "expert_": _DATA_PARALLEL,
    "moe_": _DATA_PARALLEL,
    "seq_": _DATA_PARALLEL,
    "sequence_": _DATA_PARALLEL,
    "tensor_parallel_": _DATA_PARALLEL,
    "pipeline_": _DATA_PARALLEL,
    "sparse_": "Gradients are dense: write torch.nn.Embedding(..., sparse=False)",
    "checkpoint_": _FORMAT,
}

_WEIGHTS_ONLY = "for the weights alone; otherwise everything is loaded"
_EVERYTHING = "Leave it out: a checkpoint is whole, and `latest` names the newest"
_EAGER = "Leave it out: torch.distributed is started where nobody has"
_EXAMPLE = "optimizer=torch.optim.AdamW(model_parameters, lr=1e-4)"

INITIALIZE = _counterparts(
    DEEPSPEED,
    {
        "args": ("config=args.deepspeed_config", "the arguments of the command line are your own"),
        "config_params": ("config=...", ""),
        "model_parameters": (_EXAMPLE, "or leave it out, for all that require a gradient"),
        "training_data": ("engine.dataloader(training_data)", "after initialize()"),
        "collate_fn": ("engine.dataloader(dataset, collate_fn=collate_fn)", "after initialize()"),
        "mpu": ("", _DATA_PARALLEL),
        "mesh_param": ('process_group=mesh["dp"]', "the data-parallel dimension of a DeviceMesh"),
        "dist_init_required": ("", _EAGER),
        "distributed_port": ("", "Set MASTER_PORT, or start with zero-launch --port"),
    },
)
INITIALIZE |= _counterparts(
    DDP,
    {
        "device_ids": ("", "Move the model to its device before initialize(), or leave it on the CPU to be moved"),
        "output_device": ("", "Move the model to its device before initialize(), or leave it on the CPU to be moved"),
        "find_unused_parameters": ("", "Leave it out: a parameter without a gradient is left alone"),
        "static_graph": ("", "Leave it out: any graph may follow another"),
        "gradient_as_bucket_view": ("", "Leave it out: gradients are written into buckets and dropped"),
        "broadcast_buffers": ("", "Leave it out: all start with rank 0's, and each rank goes on with its own"),
        "bucket_cap_mb": ('"zero_optimization": {"reduce_bucket_size": ...} in the configuration', "in elements"),
    },
)
INITIALIZE |= _counterparts(
    FSDP,
    {
        "mesh": ('process_group=mesh["dp"]', "a DeviceMesh of one dimension"),
        "device_mesh": ('process_group=mesh["dp"]', "a DeviceMesh of one dimension"),
        "device_id": ("", "Move the model to its device before initialize(), or leave it on the CPU to be moved"),
        "auto_wrap_policy": ('"units": ["layers.*"] in the configuration', "or leave it out"),
        "sharding_strategy": (_STAGE, ""),
        "reshard_after_forward": (_STAGE, "stage 2 keeps parameters gathered"),
        "mixed_precision": ('"bf16": {"enabled": true} in the configuration', ""),
        "mp_policy": ('"bf16": {"enabled": true} in the configuration', ""),
        "cpu_offload": ('"zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the configuration', ""),
        "offload_policy": ('"zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the configuration', ""),
        "use_orig_params": ("", "Leave it out: parameters stay the model's own"),
        "sync_module_states": ("", "Leave it out: rank 0's values are taken"),
        "param_init_fn": ("with zeroengine.meta_init():", "around the building of the model"),
    },
)
BACKWARD = _counterparts(
    DEEPSPEED,
    {
        "scale_wrt_gas": ("", _MEAN),
        "allreduce_gradients": ("with engine.no_sync():", "around a backward that keeps its gradients"),
        "release_loss": ("", "Leave it out: the loss is yours"),
        "gradient": ("engine.scale(loss).backward(gradient)", "engine.backward() takes a scalar loss"),
    },
)
STEP = _counterparts(DEEPSPEED, {"lr_kwargs": ("", "Leave it out: a schedule is stepped without arguments")})
STEP |= _counterparts(
    "torch.optim", {"closure": ("engine.step()", "no optimizer that calls a closure can be partitioned")}
)
SAVE_CHECKPOINT = _counterparts(
    DEEPSPEED,
    {
        "save_dir": ("directory=...", ""),
        "save_latest": ("", _EVERYTHING),
        "exclude_frozen_parameters": ("", "Leave it out: a checkpoint holds frozen parameters, too"),
    },
)
LOAD_CHECKPOINT = _counterparts(
    DEEPSPEED,
    {
        "load_dir": ("directory=...", ""),
        "load_module_strict": ("strict=...", ""),
        "load_module_only": ("weights_only=...", ""),
        "load_optimizer_states": ("weights_only=True", _WEIGHTS_ONLY),
        "load_lr_scheduler_states": ("weights_only=True", _WEIGHTS_ONLY),
        "custom_load_fn": ("engine.load_weights(state_dict)", "with a state dict that you made"),
    },
)
_IN_ORDER = "Leave it out: copies are ordered with the computation"
OFFLOAD_STATES = _counterparts(
    DEEPSPEED,
    {
        "pin_memory": ("", "Leave it out: memory of the CPU is taken for as long as the states are there"),
        "non_blocking": ("", _IN_ORDER),
    },
)
RELOAD_STATES = _counterparts(DEEPSPEED, {"non_blocking": ("", _IN_ORDER)})
GATHERED = _counterparts(
    DEEPSPEED,
    {
        "params": ("zeroengine.gathered(params)", "without its name"),
        "modifier_rank": ("", "Leave it out: what any rank writes is kept, of several the lowest's"),
        "fwd_module": ("", "Leave it out: a parameter belongs to every module that uses it"),
        "enabled": ("", "Leave it out: it is right at every stage"),
    },
)
META_INIT = _counterparts(
    DEEPSPEED,
    {
        "module": ("", "Leave it out: a model that is built already is passed to initialize()"),
        "config_dict_or_path": ("config=...", ""),
        "data_parallel_group": ("zeroengine.initialize(..., process_group=...)", ""),
        "dtype": ('"bf16": {"enabled": true} in the configuration', ""),
        "remote_device": ('"zero_optimization": {"offload_param": {...}} in the configuration', ""),
        "mem_efficient_linear": ("", "Leave it out: torch.nn.functional.linear is never replaced"),
        "enabled": ("", "Leave it out: it is right at every stage"),
        **{
            name: ("", "Leave it out: memory follows from the configuration")
            for name in ("pin_memory", "sequence_data_parallel_group", "param_swapper", "zero_param_parallel_group")
        },
    },
)
ARGUMENTS = {
    "initialize": INITIALIZE,
    "backward": BACKWARD,
    "step": STEP,
    "save_checkpoint": SAVE_CHECKPOINT,
    "load_checkpoint": LOAD_CHECKPOINT,
    "offload_states": OFFLOAD_STATES,
    "reload_states": RELOAD_STATES,
    "gathered": GATHERED,
    "meta_init": META_INIT,
}

_OPTIMIZER = "torch.optim.AdamW(...)"
_FUSED = "initialize() runs its update on the fused kernel, on CPUs and GPUs"
MODULE = _counterparts(
    DEEPSPEED,
    {
        "zero": (
            "zeroengine.gathered(...)",
            "it is zero.GatheredParameters, and zeroengine.meta_init() is zero.Init",
        ),
        "GatheredParameters": ("zeroengine.gathered(...)", ""),
        "Init": ("zeroengine.meta_init()", ""),
        "OnDevice": ("zeroengine.meta_init()", ""),
        "register_external_parameter": ("", "Leave it out: a parameter is gathered wherever it is used"),
        "init_distributed": ("", _EAGER),
        "add_config_arguments": ("", "Leave it out: zero-launch --config FILE and --set KEY=VALUE reach initialize()"),
        "init_inference": ("with torch.no_grad(), zeroengine.gathered(engine.module):", "there is no other inference"),
        "get_accelerator": ("torch.accelerator.current_accelerator()", "or engine.device"),
        "checkpointing": ("torch.utils.checkpoint.checkpoint(..., use_reentrant=False)", ""),
        "DeepSpeedEngine": ("zeroengine.Engine", ""),
        "DeepSpeedConfig": ("zeroengine.config.load(file)", ""),
        "DeepSpeedOptimizer": ("torch.optim.Optimizer", ""),
        "DeepSpeedCPUAdam": (_OPTIMIZER, _FUSED),
        "FusedAdam": (_OPTIMIZER, _FUSED),
        "CPUAdam": (_OPTIMIZER, _FUSED),
        "PipelineModule": ("", _DATA_PARALLEL),
        "pipe": ("", _DATA_PARALLEL),
        "moe": ("", _DATA_PARALLEL),
        "tp_model_init": ("", _DATA_PARALLEL),
        "dist": ("torch.distributed", ""),
        "log_dist": ('logging.getLogger("zeroengine")', ""),
        "logger": ('logging.getLogger("zeroengine")', ""),
    },
)
MODULE |= _counterparts(DDP, {DDP: ("zeroengine.initialize(model, optimizer, config)", "")})
MODULE |= _counterparts(FSDP, {"FullyShardedDataParallel": ("zeroengine.initialize(model, optimizer, config)", "")})
MODULE |= _counterparts(FSDP2, {"fully_shard": ("zeroengine.initialize(model, optimizer, config)", "")})
# The other functions of deepspeed.comm have the names of torch.distributed.
COMM = _counterparts(DEEPSPEED, {"init_distributed": ("", _EAGER)})

UNPACKED_ENGINE = (
    "initialize() returns the engine alone, and here it is unpacked or indexed as DeepSpeed's (engine, optimizer, "
    "training_dataloader, lr_scheduler). Write: engine = zeroengine.initialize(model, optimizer, config). The others "
    "are engine.optimizer, engine.dataloader(dataset) and engine.lr_scheduler"
)
UNPACKED_CLIENT_STATE = (
    "load_checkpoint() returns the client state alone, and here it is unpacked as DeepSpeed's (path, client_state). "
    "Write: client_state = engine.load_checkpoint(directory)"
)
