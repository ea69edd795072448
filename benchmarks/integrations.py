"""Measures a framework on the engine at stage 0 beside the same framework under its own DDP, as a ratio of speeds.

Both train the same transformer with the same batches and AdamW. They take turns for --rounds rounds; the median of the
ratios counts, and losses are compared. Run it with the Python that the framework is installed for:

    pip install .[lightning]
    python benchmarks/integrations.py --framework lightning --size s --rounds 5

Each framework has one function, which trains on one rank and returns the seconds of each step and the last loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import describe_machine
from workload import ADAMW, CLIP, SIZES, Transformer, batches

# Steps before the first one that counts: buckets and schedules settle.
WARM_UP = 3


def build(options: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)
    layers, width, heads, vocab = SIZES[options.size]
    return Transformer(layers, width, heads, vocab, options.context)


def lightning(strategy: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Train with Lightning's Trainer."""
    import lightning as framework

    from zeroengine.integrations.lightning import ZeroStrategy

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.times, self.loss = build(options), [], 0.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.times.append(time.perf_counter())
            loss = self.model(*batch)
            self.loss = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), **ADAMW)

    trainer = framework.Trainer(
        accelerator="auto",
        devices=options.ranks,
        strategy="ddp" if strategy == "ddp" else ZeroStrategy({"zero_optimization": {"stage": 0}}),
        max_steps=options.steps + WARM_UP + 1,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = batches(options.size, int(os.environ["RANK"]), options.batch, options.context)
    trainer.fit(module, data)
    return [after - before for before, after in zip(module.times, module.times[1:], strict=False)], float(module.loss)


def transformers(strategy: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Train with the Trainer of transformers. The loss is the mean over the steps, which is what it logs."""
    import transformers as framework

    from zeroengine.integrations.transformers import ZeroTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(options)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(ids, labels)}

    class Clock(framework.TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())

    steps, model, clock = options.steps + WARM_UP + 1, Model(), Clock()
    sequences = next(batches(options.size, 0, options.batch * options.ranks * steps, options.context))
    data = [{"ids": ids, "labels": labels} for ids, labels in zip(*sequences, strict=True)]
    arguments = framework.TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,
        logging_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    kind = framework.Trainer if strategy == "ddp" else ZeroTrainer
    keys = {} if strategy == "ddp" else {"zero_config": {"zero_optimization": {"stage": 0}}}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    trainer = kind(model, arguments, train_dataset=data, callbacks=[clock], optimizers=(optimizer, None), **keys)
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)], float(loss)


def accelerate(strategy: str, options: argparse.Namespace) -> tuple[list[float], float]:
    """Train in a loop of one's own on accelerate."""
    import accelerate as framework

    from zeroengine.integrations.accelerate import ZeroAccelerator

    cpu = not torch.cuda.is_available()
    if strategy == "ddp":
        accelerator = framework.Accelerator(cpu=cpu)
    else:
        accelerator = ZeroAccelerator(zero_config={"zero_optimization": {"stage": 0}}, cpu=cpu)
    model = build(options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    data = batches(options.size, accelerator.process_index, options.batch, options.context)
    times = []
    for _ in range(options.steps + WARM_UP + 1):
        times.append(time.perf_counter())
        loss = model(*(tensor.to(accelerator.device) for tensor in next(data)))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return [after - before for before, after in itertools.pairwise(times)], float(loss)


FRAMEWORKS: dict[str, Callable[[str, argparse.Namespace], tuple[list[float], float]]] = {
    "accelerate": accelerate,
    "lightning": lightning,
    "transformers": transformers,
}


def run(strategy: str, options: argparse.Namespace, arguments: list[str]) -> dict[str, float]:
    """Return the tokens per second and the last loss of rank 0 in a run of its own processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, __file__, *arguments, "--strategy", strategy]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{options.framework} with {strategy} failed:\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), required=True)
    parser.add_argument("--strategy", choices=["ddp", "zeroengine"], help="one run on this rank (used by the runs)")
    parser.add_argument("--size", choices=sorted(SIZES), default="s", help="of the model (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps that count (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens a sequence (default: %(default)s)")
    options = parser.parse_args()
    if options.strategy is not None:
        seconds, loss = FRAMEWORKS[options.framework](options.strategy, options)
        if os.environ["RANK"] == "0":
            tokens = options.batch * options.context * options.ranks
            print(json.dumps({"tokens_per_s": tokens / statistics.median(seconds[WARM_UP:]), "loss": loss}), flush=True)
        return
    ratios, losses = [], []
    for number in range(options.rounds):
        # Whichever comes second finds warm caches, so the order alternates.
        order = ("ddp", "zeroengine") if number % 2 == 0 else ("zeroengine", "ddp")
        results = {strategy: run(strategy, options, sys.argv[1:]) for strategy in order}
        ratios.append(results["zeroengine"]["tokens_per_s"] / results["ddp"]["tokens_per_s"])
        losses.append(abs(results["zeroengine"]["loss"] - results["ddp"]["loss"]))
        print(".", end="", file=sys.stderr, flush=True)
    print(f"\n{describe_machine()}; size {options.size}, {options.ranks} ranks, {options.rounds} rounds")
    print(
        f"{options.framework}: speed at stage 0 / DDP {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}); last losses differ by {max(losses):.1e}"
    )


if __name__ == "__main__":
    main()
