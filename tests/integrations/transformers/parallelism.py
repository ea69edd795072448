"""Trains with two ranks that share samples or layers, and with ranks that do not, and reports the numbers of both.

The Trainer of zeroengine, accelerate's loop, and a script for DeepSpeed's ALST, in this order.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.nn import functional as collectives
from torch.utils.data import DataLoader, Subset
from zeroengine.integrations.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from zeroengine.integrations.deepspeed.runtime.utils import move_to_device
from zeroengine.integrations.deepspeed.utils import groups

import zeroengine.integrations.deepspeed as deepspeed
from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.accelerate import ZeroAccelerator
from zeroengine.integrations.transformers import ZeroTrainer

STAGE_3 = {"zero_optimization": {"stage": 3}}
SPLIT = STAGE_3 | {"tensor_parallel": {"autotp_size": 2}}


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    found = prediction.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((found == labels)[labels != -100].mean()), "tokens": prediction.predictions.shape[1]}


def with_trainer(size: int, config: dict[str, Any], **changes: Any) -> list[dict[str, float]]:
    """Return what the Trainer logs. As many samples are in a step whatever ``size`` is."""
    arguments = training_arguments(
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        eval_strategy="epoch",
        include_num_input_tokens_seen="all",
        num_train_epochs=1,
        **changes,
    )
    data = {"train_dataset": Tokens(14), "eval_dataset": Tokens(8, seed=5)}
    trainer = ZeroTrainer(tiny_llama(), arguments, **data, zero_config=config, compute_metrics=accuracy)
    trainer.evaluate()
    trainer.train()
    trainer.engine.close()
    return [{k: v for k, v in log.items() if "time" not in k and "_per_" not in k} for log in trainer.state.log_history]


def trainer_cases() -> dict[str, Any]:
    shared = STAGE_3 | {"sequence_parallel_size": 2}
    found: dict[str, Any] = {"alone": with_trainer(1, STAGE_3), "configuration": with_trainer(2, shared)}
    # There is one group, so the mean over its labels is that over the labels of all ranks.
    changes = {"parallelism_config": ParallelismConfig(sp_size=2), "average_tokens_across_devices": False}
    found["arguments"] = with_trainer(2, STAGE_3, **changes)
    found["layers"] = with_trainer(2, SPLIT)
    return found | {"layers, arguments": with_trainer(2, STAGE_3, parallelism_config=ParallelismConfig(tp_size=2))}


class Unmasked(Tokens):
    """Samples with equally many labels: accelerate's loop takes a mean of means."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def with_accelerate(size: int) -> dict[str, Any]:
    """Return what accelerate's loop sees. Two samples are in a step whatever ``size`` is."""
    accelerator = ZeroAccelerator(STAGE_3)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # accelerate steps a schedule once for each batch that all ranks together take.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * size))
    shuffled = DataLoader(Unmasked(6), size, shuffle=True, generator=torch.Generator().manual_seed(1))
    loaders = shuffled, DataLoader(Unmasked(7, seed=5), size)
    model, optimizer, loader, evaluated, schedule = accelerator.prepare(model, optimizer, *loaders, schedule)
    found: dict[str, Any] = {"steps": len(loader), "losses": [], "rates": [], "norms": [], "predictions": []}
    for batches in (loader, accelerator.skip_first_batches(loader, 1)):
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found["losses"].append(float(accelerator.gather_for_metrics(loss.detach()).mean()))
            found["rates"].append(schedule.get_last_lr()[0])
    model.eval()
    for batch in evaluated:
        with torch.no_grad():
            logits = model(**batch).logits
        found["predictions"] += accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))[0].tolist()
    if size > 1:
        try:
            accelerator.gather_for_metrics(["text"])
        except ZeroEngineError as error:
            found["objects"] = str(error)
    accelerator.free_memory(model)
    return found


def accelerate_cases() -> dict[str, Any]:
    found = {"alone": with_accelerate(1)}
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for name, variable in (("variables", "PARALLELISM_CONFIG_SP_SIZE"), ("layers", "PARALLELISM_CONFIG_TP_SIZE")):
        os.environ[variable] = "2"
        found[name] = with_accelerate(2)
        del os.environ[variable]
    del os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"]
    return found


def with_deepspeed(size: int, stage: int) -> dict[str, list[float]]:
    """Train as DeepSpeed's own test of ALST does, with its loss over all parts."""
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="a/model",
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=1,
        seq_length=12,
        disable_in_eval=True,
    )
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": adam}
    model = tiny_llama()
    engine, *_ = deepspeed.initialize(config=config, model=model, model_parameters=model.parameters(), mpu=mpu)
    data = Tokens(6)
    loader: Any = DataLoader(data, batch_size=1)
    if mpu is not None:
        group, rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
        assert (mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()) == (group, rank)
        assert engine.get_sequence_parallel_group() is group and engine.dp_world_size == 1
        own = DataLoader(Subset(data, range(rank, 6, size)), batch_size=1)
        world_size = groups._get_sequence_parallel_world_size()
        loader = UlyssesSPDataLoaderAdapter(own, rank, group, world_size, engine.device)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "steps": [len(loader)]}
    for batch in loader:
        batch = move_to_device(batch, engine.device)
        outputs = engine(**batch)
        loss = outputs.loss
        if mpu is not None:
            labels = batch["shift_labels"]
            options = {"shift_labels": labels, "vocab_size": engine.module.config.vocab_size}
            loss = engine.module.loss_function(logits=outputs.logits, labels=None, **options)
            losses = collectives.all_gather(loss, group=group)
            counts = collectives.all_gather((labels != -100).sum(), group=group)
            loss = sum(losses[rank] * counts[rank] for rank in range(size)) / sum(counts)
        engine.backward(loss)
        engine.step()
        found["losses"].append(float(loss.detach()))
        found["norms"].append(float(engine.get_global_grad_norm()))
    engine.eval()
    whole = {name: value[None] for name, value in data[0].items()}
    with torch.no_grad():
        found["losses"].append(float(engine(**whole).loss))
    engine.destroy()
    return found


def refusals() -> list[str]:
    messages = []
    shared = {"sequence_parallel_size": 2}
    for changes, config in (
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, {}),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, {"sequence_parallel_size": 1}),
        ({"label_smoothing_factor": 0.1}, shared),
    ):
        try:
            ZeroTrainer(tiny_llama(), training_arguments(**changes), train_dataset=Tokens(4), zero_config=config)
        except ZeroEngineError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    found = {"trainer": trainer_cases(), "accelerate": accelerate_cases(), "refusals": refusals()}
    alst = {f"{size} at stage {stage}": with_deepspeed(size, stage) for size, stage in ((1, 3), (2, 0), (2, 3))}
    report(found | {"deepspeed": alst})


if __name__ == "__main__":
    main()
