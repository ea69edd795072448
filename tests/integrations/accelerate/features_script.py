"""Uses what accelerate offers beside the plain loop, on two ranks, and reports what came of it. Run by the tests."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, ProjectConfiguration, set_seed
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from tests.integrations.accelerate.loops import Small, config, data, forget, loading, loss_of, message, prepared, train
from tests.integrations.environments import report
from zeroengine import Engine, engine_of, full_master, gathered, initialize
from zeroengine.integrations.accelerate import ZeroAccelerator

# Where the runs of this script save. Other scripts of the tests import this one.
FOLDER = Path(sys.argv[-1])
STEPS_OF_SCHEDULE = ("total_num_steps", "warmup_num_steps")


def on_engine(stage: int, more: dict[str, Any] | None = None, **arguments: Any) -> ZeroAccelerator:
    forget()
    return ZeroAccelerator(zero_config=config(stage, **(more or {})), dataloader_config=loading(), **arguments)


def under_ddp(**arguments: Any) -> Accelerator:
    forget()
    return Accelerator(cpu=True, dataloader_config=loading(), **arguments)


def engine(model: nn.Module) -> Engine:
    own = engine_of(model)
    assert own is not None
    return own


def gan(accelerator: Accelerator) -> list[float]:
    """Return the losses of a generator and a discriminator, whose gradients of the other's loss are dropped."""
    set_seed(1)
    generator, discriminator = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.02) for model in (generator, discriminator)]
    generator, discriminator, *optimizers = accelerator.prepare(generator, discriminator, *optimizers)
    set_seed(10 + accelerator.process_index)
    losses = []
    for _ in range(4):
        noise, real = torch.randn(5, 4), torch.randn(5, 6)
        # The discriminator is trained by two losses, and each is backward by itself.
        fake = discriminator(generator(noise).detach())
        accelerator.backward(nn.functional.softplus(fake).mean())
        accelerator.backward(nn.functional.softplus(-discriminator(real)).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss = nn.functional.softplus(-discriminator(generator(noise))).mean()
        accelerator.backward(loss)
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        losses += [loss.item(), fake.mean().item()]
    accelerator.free_memory(generator, discriminator)
    return losses


def distillation(accelerator: Accelerator) -> list[float]:
    """Return the losses of a policy that is kept near a frozen reference."""
    set_seed(2)
    policy = Small()
    reference = copy.deepcopy(policy).requires_grad_(False)
    reference = accelerator.prepare_model(reference, evaluation_mode=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.03)
    loader = DataLoader(data(), batch_size=4)
    # In any order, and in several calls.
    optimizer, policy = accelerator.prepare(optimizer, policy)
    loader = accelerator.prepare(loader)
    losses = []
    for batch in loader:
        with torch.no_grad():
            kept = reference(batch[0]).log_softmax(-1)
        distance = nn.functional.kl_div(policy(batch[0]).log_softmax(-1), kept, log_target=True, reduction="batchmean")
        loss = loss_of(policy, batch) + distance
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory(policy, reference)
    return losses


def autocast_matches_ddp() -> dict[str, Any]:
    def run(accelerator: Accelerator) -> tuple[list[float], str]:
        objects = prepared(accelerator)
        losses = train(accelerator, objects, range(1))
        kind = str(objects[0](data()[:2][0]).dtype)
        accelerator.free_memory(objects[0])
        return losses, kind

    autocast = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
    return {
        "ddp": run(under_ddp(mixed_precision="bf16")),
        "zero": run(on_engine(2, autocast, mixed_precision="bf16")),
        "zero without an argument": run(on_engine(3, autocast)),
    }


def bf16_from_an_argument() -> list[Any]:
    accelerator = on_engine(3, {"data_types": {"buffer_dtype": "bf16"}}, mixed_precision="bf16")
    objects = model, *_ = prepared(accelerator)
    losses = train(accelerator, objects, range(2))
    facts = [str(model.head.weight.dtype), accelerator.mixed_precision, losses[0], losses[-2]]
    accelerator.free_memory(model)
    return facts


def evaluated_before_training() -> list[Any]:
    """Evaluate in bf16 at stage 3, which must not round the values that training starts from."""
    accelerator = on_engine(3, {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}})
    set_seed(0)
    model = Small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = accelerator.prepare_model(model, evaluation_mode=True)
    with torch.no_grad():
        first = loss_of(model, data()[:4])
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.03)
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(model, optimizer)
    exact = all(torch.equal(full_master(param), before[name]) for name, param in model.named_parameters())
    loss = loss_of(model, data()[:4])
    accelerator.backward(loss)
    optimizer.step()
    accelerator.free_memory(model)
    return [exact, abs(first.item() - loss.item()), bool(torch.isfinite(loss))]


def weights_are_whole() -> list[bool]:
    accelerator = on_engine(3)
    objects = model, *_ = prepared(accelerator)
    train(accelerator, objects, range(1))
    own = accelerator.unwrap_model(model)
    state_dict = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(FOLDER / "weights"))
    accelerator.save_model(model, str(FOLDER / "pickled"), safe_serialization=False)
    accelerator.wait_for_everyone()
    saved = load_file(FOLDER / "weights" / "model.safetensors")
    pickled = torch.load(FOLDER / "pickled" / "pytorch_model.bin", weights_only=True)
    with gathered(model):
        values = {name: value.clone() for name, value in model.state_dict().items()}
    whole = all(torch.equal(value, values[name]) for kept in (saved, pickled) for name, value in kept.items())
    accelerator.free_memory(model)
    return [own is model, len(state_dict) == (len(values) if accelerator.is_main_process else 0), whole]


def local_gradients(stage: int) -> list[float]:
    """Return the weights after one step of two backwards, the first of which is under `no_sync`."""
    weights = []
    for accelerator in (under_ddp(), on_engine(stage)):
        set_seed(3)
        model = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(accelerator.process_index))
        with accelerator.no_sync(model):
            accelerator.backward(model(x).square().mean())
        model(x).sin().mean().backward()
        optimizer.step()
        state_dict = engine(model).full_state_dict() if stage_of(model) is not None else model.module.state_dict()
        weights.append(state_dict["weight"])
        accelerator.free_memory(model)
    return [(weights[0] - weights[1]).abs().max().item()]


def stage_of(model: nn.Module) -> Any:
    own = engine_of(model)
    return None if own is None else own.config.zero_optimization.stage


def configured_optimizer() -> list[list[float]]:
    """Return losses and rates: of the configuration's optimizer and schedule, and of an engine's own loop."""

    def sections(optimizer: dict[str, Any], schedule: dict[str, Any]) -> dict[str, Any]:
        return {
            "optimizer": {"type": "AdamW", "params": optimizer},
            "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        }

    is_open = sections(dict.fromkeys(("lr", "weight_decay"), "auto"), dict.fromkeys(STEPS_OF_SCHEDULE, "auto"))
    accelerator = on_engine(2, is_open)
    set_seed(0)
    model, loader = Small(), DataLoader(data(), batch_size=2)
    optimizer = DummyOptim(model.parameters(), lr=0.03, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=3)
    objects = accelerator.prepare(model, optimizer, loader, schedule)
    values = train(accelerator, objects, range(1))
    accelerator.free_memory(model)
    # accelerate counts the batches of both ranks.
    numbers = sections({"lr": 0.03, "weight_decay": 0.1}, dict(zip(STEPS_OF_SCHEDULE, (20, 3), strict=True)))
    set_seed(0)
    own = initialize(Small(), None, config(2, **numbers))
    expected = []
    for batch in objects[2]:
        loss = loss_of(own.module, batch)
        own.backward(loss)
        expected.append(own.clip_grad_norm_(0.5).item())
        own.step()
        expected += [loss.item(), own.optimizer.param_groups[0]["lr"]]
    own.close()
    return [values, expected]


def losses_of_updates(accelerator: ZeroAccelerator) -> list[float]:
    """Return the loss before each of 8 updates on one batch. Steps that are skipped change nothing."""
    model, optimizer, _, _ = prepared(accelerator)
    losses: list[float] = []
    for _ in range(60):
        loss = loss_of(model, data()[:4])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [] if accelerator.optimizer_step_was_skipped else [loss.item()]
        if len(losses) == 8:
            break
    return losses


def fp16_from_arguments() -> list[Any]:
    """Train in fp16 as the arguments say, from a scale of the loss at which gradients overflow."""
    fp32 = on_engine(2)
    expected = losses_of_updates(fp32)
    fp32.free_memory(*fp32._models)
    keys = ("enabled", "initial_scale_power", "loss_scale_window")
    scale = GradScalerKwargs(init_scale=2.0**24, growth_interval=1000)
    facts = []
    for section in ({}, {"fp16": dict.fromkeys(keys, "auto")}):
        more = {"data_types": {"buffer_dtype": "fp16"}, **section}
        accelerator = on_engine(2, more, mixed_precision="fp16", kwargs_handlers=[scale])
        losses = losses_of_updates(accelerator)
        (own,) = accelerator._training_engines()
        facts.append([str(next(own.module.parameters()).dtype), own.skipped_steps, own.loss_scale, losses])
        accelerator.free_memory(own.module)
    return [expected, *facts]


def skipped_step() -> list[Any]:
    accelerator = on_engine(2)
    model, optimizer, _, scheduler = prepared(accelerator)
    facts: list[Any] = []
    for factor in (1.0, float("inf"), 1.0):
        accelerator.backward(loss_of(model, data()[:4]) * factor)
        optimizer.step()
        scheduler.step()
        facts += [accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()[0]]
    accelerator.free_memory(model)
    return facts


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def named_checkpoints() -> list[Any]:
    """Save three checkpoints of which two are kept, with a registered object and hooks, and load the newest."""
    project = ProjectConfiguration(project_dir=str(FOLDER / "project"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = on_engine(3, project_config=project)
    model, optimizer, loader, scheduler = prepared(accelerator)
    calls: list[Any] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: calls.append([len(models), len(weights)]))
    accelerator.register_load_state_pre_hook(lambda models, folder: calls.append(len(models)))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for _ in range(3):
        counter.count += 1
        train(accelerator, (model, optimizer, loader, scheduler), range(1))
        accelerator.save_state()
    accelerator.wait_for_everyone()
    rate, counter.count = scheduler.get_last_lr()[0], 0
    loss = loss_of(model, data()[:4]).item()
    train(accelerator, (model, optimizer, loader, scheduler), range(1))
    accelerator.load_state()
    names = sorted(path.name for path in (FOLDER / "project" / "checkpoints").iterdir())
    same = scheduler.get_last_lr()[0] == rate and loss_of(model, data()[:4]).item() == loss
    # A run on one rank goes on from this one.
    accelerator.save_state()
    accelerator.free_memory(model)
    return [names, counter.count, same, calls, loss]


def errors_of_training() -> dict[str, str]:
    texts = {}
    accelerator = on_engine(3, gradient_accumulation_steps=2)
    set_seed(0)
    model = Small()
    model = accelerator.prepare(model)
    loss = loss_of(model, data()[:4])
    texts["backward before the optimizer"] = message(lambda: accelerator.backward(loss))
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    texts["an optimizer of another model"] = message(lambda: accelerator.prepare(stranger))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    strange_schedule = torch.optim.lr_scheduler.StepLR(stranger, 1)
    texts["a schedule of another optimizer"] = message(lambda: accelerator.prepare(strange_schedule))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    texts["a wrapped model"] = message(lambda: accelerator.prepare(wrapped))
    texts["a second optimizer"] = message(lambda: accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, data()[:4]))
        texts["clipping too early"] = message(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
        texts["saving too early"] = message(lambda: accelerator.save_state(str(FOLDER / "early")))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, data()[:4]))
        texts["another norm"] = message(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
        texts["a part"] = message(lambda: accelerator.clip_grad_norm_(model.head.parameters(), 1.0))
        texts["clipping values"] = message(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
        texts["a closure"] = message(lambda: optimizer.step(lambda: 0.0))
        optimizer.step()
    texts["no such folder"] = message(lambda: accelerator.load_state(str(FOLDER / "nowhere")))
    (FOLDER / "other").mkdir(exist_ok=True)
    texts["a folder of accelerate"] = message(lambda: accelerator.load_state(str(FOLDER / "other")))

    def uneven() -> None:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass

    texts["uneven inputs"] = message(uneven)
    accelerator.free_memory(model)
    both = on_engine(0)
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    shared = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    texts["an optimizer of two models"] = message(lambda: both.prepare(*models, shared))
    sized = on_engine(0, {"train_micro_batch_size_per_gpu": 3})
    texts["another batch size"] = message(lambda: prepared(sized))
    named = on_engine(0, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    texts["two optimizers"] = message(lambda: prepared(named))
    return texts


def main() -> None:
    results: dict[str, Any] = {
        "gan": [gan(under_ddp()), gan(on_engine(0)), gan(on_engine(2)), gan(on_engine(3))],
        "distillation": [distillation(under_ddp()), distillation(on_engine(3))],
        "autocast": autocast_matches_ddp(),
        "bf16": bf16_from_an_argument(),
        "evaluated": evaluated_before_training(),
        "weights": weights_are_whole(),
        "no_sync": [local_gradients(0), local_gradients(3)],
        "configured": configured_optimizer(),
        "fp16": fp16_from_arguments(),
        "skipped": skipped_step(),
        "named": named_checkpoints(),
        "errors": errors_of_training(),
    }
    report(results)


if __name__ == "__main__":
    main()
