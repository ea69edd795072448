"""Trains a language model on the bytes of real text: the Python standard library's own source files.

    zero-launch --nproc 2 --config configs/zero2.json examples/train_lm.py

Another configuration file gives another stage; the script stays as it is. `--text FILE` trains on your own text.
With `--checkpoint FOLDER` the script saves checkpoints, and a later run continues at any stage and number of ranks.
With configs/snapshots.json, ranks that are started again continue from the memory of the hosts.
"""

from __future__ import annotations

import argparse
import math
import resource
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import zeroengine

# A token is a byte.
VOCABULARY = 256
# Bytes of the standard library to train on.
TEXT_LIMIT = 8 << 20
# Every 20th file is held out for evaluation, or the last 20th of a single text.
HELD_OUT = 20
# The steps that give the estimate of the run's duration. Earlier ones are slower.
TIMED_STEPS = range(3, 9)
# --minutes chooses at least so many steps, among them the timed ones and a warm-up.
LEAST_STEPS = 20


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes. With targets, returns the mean loss in nats per byte."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, generator: torch.Generator) -> bytes:
        """Continue the prompt by `count` sampled bytes."""
        ids = torch.tensor([list(prompt)], device=self.head.weight.device)
        for _ in range(count):
            logits = self(ids[:, -self.context :])[0, -1]
            choice = torch.multinomial((logits / 0.8).softmax(0).cpu(), 1, generator=generator)
            ids = torch.cat([ids, choice.view(1, 1).to(ids)], dim=1)
        return bytes(ids[0].tolist())


def read_text(path: Path | None, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on and the held-out bytes: some files of the standard library, or the end of a text."""
    if path is not None:
        if not path.is_file():
            raise SystemExit(f"--text {path}: there is no such file")
        text = path.read_bytes()
        cut = len(text) - len(text) // HELD_OUT
        parts = [bytearray(text[:cut]), bytearray(text[cut:])]
    else:
        parts = [bytearray(), bytearray()]
        for index, file in enumerate(library_files()):
            if len(parts[0]) < TEXT_LIMIT:
                parts[index % HELD_OUT == HELD_OUT - 1] += file.read_bytes()
    if min(map(len, parts)) <= context:
        origin = path or f"the standard library in {sysconfig.get_path('stdlib')}"
        needed = HELD_OUT * (context + 1)
        raise SystemExit(f"{origin} has too little text: name a file of at least {needed:,} bytes with --text")
    train, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, held_out


def library_files() -> list[Path]:
    """Return the standard library's source files without its tests, in the same order everywhere."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file.relative_to(library) for file in library.rglob("*.py"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return [library / file for file in files if not skipped & set(file.parts)]


def sample(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each (batch, context): the bytes from each start, and the bytes one further."""
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def draw(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random sample, which is the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return sample(text, torch.randint(len(text) - context, (batch,), generator=generator), context)


@torch.no_grad()
def evaluate(engine: zeroengine.Engine, text: torch.Tensor, count: int) -> float:
    """Return the held-out loss in nats per byte over `count` evenly spaced batches per rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch, context = engine.config.train_micro_batch_size_per_gpu, engine.module.context
    starts = torch.linspace(0, len(text) - context - 1, count * batch * world_size).long()
    total = torch.zeros(1, dtype=torch.float64)
    engine.eval()
    for chunk in starts.view(world_size, count, batch)[rank]:
        ids, targets = sample(text, chunk, context)
        total += engine(ids.to(engine.device), targets.to(engine.device)).double().cpu()
    engine.train()
    total = total.to(engine.device)
    dist.all_reduce(total)
    return total.item() / (count * world_size)


def unigram_entropy(text: torch.Tensor) -> float:
    """Return the loss, in nats, of a model that knows only how frequent each byte is."""
    frequency = torch.bincount(text.int(), minlength=VOCABULARY).double() / len(text)
    return -torch.special.xlogy(frequency, frequency).sum().item()


def used_memory(device: torch.device) -> str:
    """Return the memory of this process: what torch has allocated on a GPU, else its resident memory."""
    if device.type == "cuda":
        return f"{torch.cuda.memory_allocated(device) / 2**20:.0f} MiB allocated"
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"{resident_pages * resource.getpagesize() / 2**20:.0f} MiB resident"


def train(engine: zeroengine.Engine, text: torch.Tensor, options: argparse.Namespace) -> None:
    """Train until step `options.steps`, or for `options.minutes`.

    Rank 0 shows a progress bar on a terminal, and lines elsewhere.
    """
    step, rank, world_size = engine.global_steps, dist.get_rank(), dist.get_world_size()
    steps = options.steps if options.minutes is None else step + LEAST_STEPS
    batch, context = engine.config.train_micro_batch_size_per_gpu, engine.module.context
    console = Console()
    show_bar = console.is_terminal and rank == 0
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn()
    micro_steps = engine.config.micro_steps_in_mean
    # The first lines come when the number of steps is known.
    report_every = 10 if show_bar else max(1, steps // 20) if options.minutes is None else steps
    total, done, tokens, start = torch.zeros((), device=engine.device), 0, 0, time.perf_counter()
    began, timed_since, first = start, start, step
    with Progress(*columns, console=console, disable=not show_bar) as progress:
        task = progress.add_task("training", total=steps if options.minutes is None else None, completed=step)
        while step < steps:
            step += 1
            for _ in range(micro_steps):
                seed = (options.seed * 10**9 + engine.micro_steps) * world_size + rank
                ids, targets = draw(text, batch, context, seed)
                loss = engine(ids.to(engine.device), targets.to(engine.device))
                engine.backward(loss)
                engine.step()
                total += loss.detach()
                tokens += ids.numel() * world_size
                done += 1
            progress.advance(task)
            if step - first == TIMED_STEPS.start:
                timed_since = time.perf_counter()
            elif step - first == TIMED_STEPS.stop:
                now = time.perf_counter()
                seconds = (now - timed_since) / len(TIMED_STEPS)
                if options.minutes is not None:
                    # The clocks of ranks differ, so that of rank 0 chooses.
                    fitting = step + int((60 * options.minutes - (now - began)) / seconds)
                    chosen = torch.tensor(max(steps, fitting), device=engine.device)
                    dist.broadcast(chosen, 0)
                    steps = int(chosen)
                    report_every = 10 if show_bar else max(1, (steps - first) // 20)
                    progress.update(task, total=steps)
                if rank == 0:
                    print(f"{steps - step:,} steps left, about {duration(seconds * (steps - step))}", flush=True)
            if step % report_every == 0 or step == steps:
                mean = total.item() / done
                speed = tokens / (time.perf_counter() - start)
                status = f"loss {mean:.3f}  {speed:,.0f} tokens/s  {used_memory(engine.device)}"
                progress.update(task, description=status)
                if rank == 0 and not show_bar:
                    print(f"step {step:>{len(str(steps))}}/{steps}  {status}", flush=True)
                total.zero_()
                done, tokens, start = 0, 0, time.perf_counter()
            if options.checkpoint is not None and (step % options.save_every == 0 or step == steps):
                engine.save_checkpoint(options.checkpoint)
                start = time.perf_counter()


def duration(seconds: float) -> str:
    """Return the duration in seconds or minutes."""
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def printable(text: bytes) -> str:
    """Return the text as a terminal may safely show it."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.decode(errors="replace")
    )


def parse() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train a language model on bytes of text under zeroengine.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="the configuration (default: the one that zero-launch names)")
    add("--text", metavar="FILE", type=Path, help="the text to learn (default: Python's standard library)")
    add("--steps", type=int, default=1000, help="the step to train until (default: %(default)s)")
    add("--minutes", type=float, help="train so long instead, by as many steps as fit at the speed of the first ones")
    add("--layers", type=int, default=4, help="transformer blocks (default: %(default)s)")
    add("--width", type=int, default=192, help="features of a token, a multiple of --heads (default: %(default)s)")
    add("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    add("--context", type=int, default=128, help="bytes that the model sees at once (default: %(default)s)")
    add("--eval-batches", type=int, default=8, help="held-out batches a rank (default: %(default)s)")
    add("--prompt", default="def ", help="what the sample at the end begins with (default: %(default)r)")
    add("--sample-bytes", type=int, default=300, help="length of that sample (default: %(default)s)")
    add("--checkpoint", metavar="FOLDER", type=Path, help="save into it, and go on from its newest checkpoint")
    add("--save-every", type=int, default=200, help="steps between checkpoints (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and sample (default: %(default)s)")
    options = parser.parse_args()
    for name in ("steps", "layers", "width", "heads", "context", "eval_batches", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if not options.prompt:
        parser.error("--prompt must not be empty")
    return options


def main() -> None:
    """Train, evaluate before and after, and show memory and a sample of what the model writes."""
    options = parse()
    text, held_out = read_text(options.text, options.context)
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine = zeroengine.initialize(model=model, config=options.config)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def nats(loss: float) -> str:
        return f"{loss:.4f} nats per byte ({loss / math.log(2):.3f} bits)"

    stage = engine.config.zero_optimization.stage
    say(f"{size:,} parameters at stage {stage} on {world_size} rank{'s' * (world_size > 1)} ({engine.device.type})")
    say(f"{len(text):,} bytes to learn, {len(held_out):,} held out")
    if options.minutes is None:
        say(f"training until step {options.steps:,}; --steps N changes that")
    else:
        say(f"training for {options.minutes:g} minutes; --steps N names a number of steps instead")
    say(f"byte unigram entropy  {nats(unigram_entropy(text))}")
    say(f"held-out loss before  {nats(evaluate(engine, held_out, options.eval_batches))}")
    if engine.resume(options.checkpoint):
        say(f"continues after step {engine.global_steps}")
    train(engine, text, options)
    held_out_loss = evaluate(engine, held_out, options.eval_batches)
    engine.log(held_out_loss=held_out_loss)
    say(f"held-out loss after   {nats(held_out_loss)}")

    states = f"{engine.memory().states / 2**20:.1f} MiB of parameters, gradients and optimizer state"
    memory: list[str] = [""] * world_size
    dist.all_gather_object(memory, f"{used_memory(engine.device)}, {states}")
    for number, line in enumerate(memory):
        say(f"memory of rank {number}      {line}")

    with zeroengine.gathered(engine.module):
        if rank == 0:
            generator = torch.Generator().manual_seed(options.seed)
            sample = model.generate(options.prompt.encode(), options.sample_bytes, generator)
            say(f"a sample:\n{printable(sample)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
