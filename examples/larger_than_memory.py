"""Trains a model that is larger than the memory the process may use, with all its states on a local disk.

    python examples/larger_than_memory.py --nvme /local_nvme --memory-mib 1000

The script ends itself as soon as it holds more than `--memory-mib`, as a container would, and trains a GPT whose
parameters, gradients and optimizer state take more. Parameters are read from the disk before their use. The model is
built without memory, so it never exists as a whole. With `--plain` torch alone trains the same model, and does not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from train_lm import GPT, draw, read_text

import zeroengine

MIB = 2**20


def used_bytes() -> int:
    """Return the bytes of memory that this process holds, without pages of files, which the kernel may take back."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


class MemoryLimit(threading.Thread):
    """Ends the process when it holds more memory than allowed, as the kernel does in a container.

    Args:
        num_bytes: How much more than now.

    Attributes:
        peak: The most so far, in bytes more than at the start.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(daemon=True)
        self._start_bytes, self._num_bytes = used_bytes(), num_bytes
        self.peak = 0
        self.start()

    def run(self) -> None:
        """Look every few milliseconds."""
        while True:
            self.peak = max(self.peak, used_bytes() - self._start_bytes)
            if self.peak > self._num_bytes:
                print(f"out of memory: {self.peak / MIB:,.0f} MiB in use", file=sys.stderr, flush=True)
                os._exit(137)
            time.sleep(0.003)


def configuration(folder: Path) -> dict[str, object]:
    """Return a configuration that keeps every state in files below `folder`."""
    place = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, "buffer_count": 3},
            # A few small buffers, which the update passes through.
            "offload_optimizer": {**place, "buffer_size": 1 << 18},
            # Without these limits the engine would read several blocks ahead.
            "prefetch_bucket_size": 0,
            "max_live_parameters": 1,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
    }


def plain_step(model: torch.nn.Module) -> Callable[[torch.Tensor], None]:
    """Return a function that takes one step of torch's AdamW with a loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Train, and print what the states take and what the process was allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="a folder on a local disk")
    parser.add_argument("--memory-mib", type=int, default=1000, help="what the process may use")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="train with torch alone, to see that it does not fit")
    options = parser.parse_args()

    text, _ = read_text(None, options.context)
    # Threads have stacks and heaps of their own, which count as memory.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = MemoryLimit(options.memory_mib * MIB)
    shape = (options.layers, options.width, 8, options.context)
    with contextlib.nullcontext() if options.plain else zeroengine.meta_init():
        model = GPT(*shape)
    num_parameters = sum(param.numel() for param in model.parameters())
    # In fp32 each parameter has a gradient and two moments.
    states = 16 * num_parameters
    print(
        f"{num_parameters:,} parameters, states of {states // MIB:,} MiB, {options.memory_mib:,} MiB allowed",
        flush=True,
    )
    if states <= options.memory_mib * MIB:
        raise SystemExit("the states fit into memory: lower --memory-mib, or raise --layers")
    engine = None if options.plain else zeroengine.initialize(model, config=configuration(options.nvme))
    take_step = plain_step(model) if engine is None else None
    for step in range(1, options.steps + 1):
        # The same few samples again and again, so that a short run shows the loss fall.
        ids, targets = draw(text, options.batch, options.context, seed=step % 2)
        if engine is not None:
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
        elif take_step is not None:
            loss = model(ids, targets)
            take_step(loss)
        print(f"step {step}/{options.steps}  loss {loss.item():.3f}", flush=True)
    if engine is not None:
        print(engine.memory())
        print(f"at most {limit.peak / MIB:,.0f} MiB were in use")
        # engine.close() would leave an ordinary model, whole and in memory. Save with engine.save_weights(folder).


if __name__ == "__main__":
    main()
