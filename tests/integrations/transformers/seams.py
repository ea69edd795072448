"""Reports which methods and attributes of the frameworks, on which the integration relies, are missing or changed."""

from __future__ import annotations

import inspect
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from trl import DPOTrainer, GRPOTrainer

from tests.integrations.environments import report

# The parameters by name, in order, of the methods that the integration overrides or calls.
METHODS: dict[type, dict[str, str]] = {
    Trainer: {
        "_build_accelerator_args": "self, kwargs",
        "create_accelerator_and_postprocess": "self",
        "_move_model_to_device": "self, model, device",
        "set_initial_training_values": "self, args, dataloader",
        "_init_training_state": "self, max_steps, num_update_steps_per_epoch, num_train_epochs, "
        "resume_from_checkpoint, trial",
        "_run_epoch": "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch",
        "_prepare_for_training": "self, max_steps, train_dataloader, resume_from_checkpoint",
        "create_optimizer": "self, model",
        "get_optimizer_cls_and_kwargs": "args, model",
        "create_scheduler": "self, num_training_steps, optimizer",
        "_has_mixed_mesh_grads": "self, model",
        "get_batch_samples": "self, epoch_iterator, num_batches, device",
        "_get_num_items_in_batch": "self, batch_samples, device",
        "get_tp_size": "self",
        "call_model_init": "self, trial",
        "evaluation_loop": "self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
        "prediction_step": "self, model, inputs, prediction_loss_only, ignore_keys",
        "_save_optimizer_and_scheduler": "self, output_dir",
        "_load_from_checkpoint": "self, resume_from_checkpoint, model",
        "_load_optimizer_and_scheduler": "self, checkpoint",
        "_load_best_model": "self",
        "save_model": "self, output_dir, _internal_call",
        "_save": "self, output_dir, state_dict",
    },
    Accelerator: {
        "prepare": "self, args, device_placement",
        "prepare_model": "self, model, device_placement, evaluation_mode",
        "unwrap_model": "self, model, keep_fp32_wrapper, keep_torch_compile",
        "backward": "self, loss, kwargs",
        "no_sync": "self, model",
        "clip_grad_norm_": "self, parameters, max_norm, norm_type",
        "get_state_dict": "self, model, unwrap",
        "gather_for_metrics": "self, input_data, use_gather_object",
    },
    Seq2SeqTrainer: {
        "prediction_step": "self, model, inputs, prediction_loss_only, ignore_keys, gen_kwargs",
    },
    GRPOTrainer: {
        "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images",
    },
    DPOTrainer: {"_precompute_ref_logps": "self, dataset, name, batch_size"},
    AcceleratedOptimizer: {
        "__init__": "self, optimizer, device_placement, scaler",
        "step": "self, closure",
    },
}
# Names that the source of a method has to contain: what it does around our overrides.
USES: dict[Any, list[str]] = {
    Trainer._prepare_for_training: ["create_optimizer()", "self.accelerator.prepare(self.model, self.optimizer)"],
    Trainer._run_epoch: ["_set_sync_gradients(do_sync_step)", "self.accelerator.no_sync", "optimizer_step_was_skipped"],
    Trainer._inner_training_loop: ["self._prepare_for_training(", "steps_in_epoch=steps_in_epoch"],
    Trainer.train: ["self._load_from_checkpoint(resume_from_checkpoint)"],
    Trainer.evaluation_loop: ["len(self.accelerator._models) == 0"],
    Trainer._save_checkpoint: ["self.save_model(output_dir, _internal_call=True)", "_save_optimizer_and_scheduler"],
    Seq2SeqTrainer.prediction_step: ['gen_kwargs.get("synced_gpus"', "self._gen_kwargs"],
    DPOTrainer.__init__: ["self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)"],
    GRPOTrainer.__init__: ["self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)"],
    Trainer._clip_grad_norm: ["self.accelerator.clip_grad_norm_("],
    Trainer.training_step: ["self.accelerator.backward(loss"],
    Trainer.compute_loss: ["self.accelerator.num_processes // self.get_tp_size()"],
    Trainer.get_total_train_batch_size: ["args.world_size // self.get_tp_size()"],
    AcceleratedOptimizer.step_was_skipped.fget: ["_is_overflow"],
}
FIELDS = (
    "deepspeed fsdp fp16_full_eval bf16_full_eval n_gpu per_device_train_batch_size gradient_accumulation_steps "
    "world_size bf16 fp16 learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
    "predict_with_generate save_on_each_node push_to_hub hub_revision eval_use_gather_object "
    "get_warmup_steps should_save optim"
)


def main() -> None:
    changed = []
    for owner, methods in METHODS.items():
        for name, expected in methods.items():
            method = getattr(owner, name, None)
            found = ", ".join(inspect.signature(method).parameters) if method else "absent"
            if found != expected:
                changed.append(f"{owner.__name__}.{name}: ({found}), and not ({expected})")
    for function, texts in USES.items():
        source = inspect.getsource(function)
        changed += [f"{function.__qualname__} does not contain {text!r}" for text in texts if text not in source]
    arguments = Seq2SeqTrainingArguments("unused", report_to=[], use_cpu=True)
    changed += [f"TrainingArguments has no {name}" for name in FIELDS.split() if not hasattr(arguments, name)]
    assert issubclass(Seq2SeqTrainer, Trainer)
    report(changed)


if __name__ == "__main__":
    main()
