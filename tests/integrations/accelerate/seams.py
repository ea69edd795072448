"""Reports which methods and attributes of accelerate, on which the integration relies, are missing or changed."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate.checkpointing
import accelerate.utils.deepspeed
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs

from tests.integrations.environments import report

# The parameters, in order, of what the integration overrides or calls.
SIGNATURES: dict[Any, dict[str, str]] = {
    Accelerator: {
        "prepare": "self args device_placement",
        "prepare_model": "self model device_placement evaluation_mode",
        "prepare_optimizer": "self optimizer device_placement",
        "prepare_scheduler": "self scheduler",
        "prepare_data_loader": "self data_loader device_placement slice_fn_for_dispatch",
        "skip_first_batches": "self dataloader num_batches",
        "gather_for_metrics": "self input_data use_gather_object",
        "_prepare_one": "self obj first_pass device_placement",
        "unwrap_model": "self model keep_fp32_wrapper keep_torch_compile",
        "verify_device_map": "self model",
        "backward": "self loss kwargs",
        "no_sync": "self model",
        "accumulate": "self models",
        "join_uneven_inputs": "self joinables even_batches",
        "clip_grad_norm_": "self parameters max_norm norm_type",
        "clip_grad_value_": "self parameters clip_value",
        "autocast": "self autocast_handler",
        "get_state_dict": "self model unwrap",
        "save_model": "self model save_directory max_shard_size safe_serialization",
        "save_state": "self output_dir safe_serialization save_model_func_kwargs",
        "load_state": "self input_dir load_kwargs load_model_func_kwargs",
        "free_memory": "self objects",
        "end_training": "self",
    },
    AcceleratedOptimizer: {"__init__": "self optimizer device_placement scaler", "step": "self closure"},
    AcceleratedScheduler: {"__init__": "self scheduler optimizers step_with_optimizer split_batches"},
    accelerate.checkpointing: {
        "save_accelerator_state": "output_dir model_states optimizers schedulers dataloaders process_index step scaler "
        "save_on_each_node safe_serialization",
        "load_accelerator_state": "input_dir models optimizers schedulers dataloaders process_index scaler "
        "map_location load_kwargs load_model_func_kwargs",
        "save_custom_state": "obj path index save_on_each_node",
        "load_custom_state": "obj path index",
    },
    accelerate.utils.deepspeed: {
        "DummyOptim": "params lr weight_decay kwargs",
        "DummyScheduler": "optimizer total_num_steps warmup_num_steps lr_scheduler_callable kwargs",
    },
}
# Names that the source of a method has to contain: what it does around our overrides.
USES: dict[Any, list[str]] = {
    Accelerator.prepare: ["self._prepare_one(obj, first_pass=True", "_is_accelerate_prepared"],
    Accelerator.gather_for_metrics: ["self.gather(input_data)"],
    Accelerator.prepare_data_loader: ["self.num_processes", "self.process_index", "self.dispatch_batches"],
    DataLoaderShard.__iter__: ["self.base_dataloader.__iter__()"],
    Accelerator._prepare_one: ["self.prepare_model(", "self.prepare_optimizer(", "self.prepare_scheduler("],
    Accelerator.prepare_optimizer: ["_is_accelerate_prepared"],
    Accelerator.accumulate: ["self._do_sync()", "self.no_sync("],
    AcceleratedOptimizer.step_was_skipped.fget: ["_is_overflow"],
    AcceleratedScheduler.step: ["step_was_skipped", "sync_gradients"],
}
ATTRIBUTES = (
    "_models _optimizers _schedulers _dataloaders _custom_objects _save_model_state_pre_hook "
    "_load_model_state_pre_hook project_configuration project_dir save_iteration dataloader_config autocast_handler "
    "sync_gradients step state gradient_accumulation_steps num_processes process_index split_batches even_batches "
    "device"
)


def main() -> None:
    changed = []
    for owner, names in SIGNATURES.items():
        for name, expected in names.items():
            function = getattr(owner, name, None)
            actual = " ".join(inspect.signature(function).parameters) if function else "absent"
            if actual != expected:
                changed.append(f"{owner.__name__}.{name}: ({actual}), and not ({expected})")
    for function, texts in USES.items():
        source = inspect.getsource(function)
        changed += [f"{function.__qualname__} does not contain {text!r}" for text in texts if text not in source]
    accelerator = Accelerator(cpu=True)
    changed += [f"Accelerator has no {name}" for name in ATTRIBUTES.split() if not hasattr(accelerator, name)]
    changed += [
        f"GradientState has no {name}" for name in ("num_steps", "sync_gradients") if name not in dir(GradientState())
    ]
    handlers = {GradScalerKwargs: "init_scale growth_factor backoff_factor growth_interval enabled"}
    handlers |= {AutocastKwargs: "enabled cache_enabled", DistributedDataParallelKwargs: "comm_hook"}
    for handler, fields in handlers.items():
        changed += [f"{handler.__name__} has no {name}" for name in fields.split() if not hasattr(handler(), name)]
    report(changed)


if __name__ == "__main__":
    main()
