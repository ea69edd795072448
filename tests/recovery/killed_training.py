"""A training that kills interrupt: what it records, and how the moments of its snapshots are made long and marked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Divides by the ranks of all worlds.
CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 3},
    "comm": {"timeout_seconds": 15},
}
SAVE_EVERY = 400  # steps between two checkpoints on the disk, more than between two snapshots
POINTS = ("files", "sending", "commit", "committed", "removal")
LONGEST_S = 0.15  # that a rank stays at a point


def build() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))


def take_step(engine: Any) -> str:
    """The loss, in hexadecimal. Inputs depend on the random state, which a snapshot has to keep as well."""
    import torch

    step, loss = engine.global_steps, torch.empty(0)
    while engine.global_steps == step:
        inputs = torch.randn(1, 16) + step % 7
        loss = (engine(inputs) - inputs.roll(1)).square().mean()
        engine.backward(loss)
        engine.step()
    return float(loss.detach()).hex()


def digest_of(engine: Any) -> str:
    """A digest of the weights, on rank 0. A collective."""
    digest = hashlib.sha256()
    for name, value in (engine.full_state_dict() or {}).items():
        digest.update(name.encode() + value.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Train under zero-launch: FOLDER STEPS EVERY_SECONDS SEED MEMORY."""
    import torch

    import zeroengine

    folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rank, round_index = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if every and sys.argv[4] != "-":
        make_long(folder, random.Random(f"{sys.argv[4]} {rank} {round_index}"))
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    # The second one prints, which no other does once there is a first one.
    for one in (handler, logging.StreamHandler()):
        logging.getLogger("zeroengine").addHandler(one)
    section = {"every_seconds": every, "folder": sys.argv[5] or None} if every else {}
    engine = zeroengine.initialize(build(), config={**CONFIG, "snapshots": section})
    torch.manual_seed(1 + rank)
    engine.resume(folder / "ckpt")
    text = next((text for text in texts if text.startswith("resumed from")), "")
    facts = {"round": round_index, "world": engine.world_size}

    def record(**more: Any) -> None:
        if rank == 0:
            with open(folder / "record", "a") as file:
                file.write(json.dumps({**facts, **more, "time": time.monotonic()}) + "\n")

    record(resumed=engine.global_steps, text=text, digest=digest_of(engine))
    while engine.global_steps < steps and not (folder / "stop").exists():
        loss = take_step(engine)
        record(step=engine.global_steps, loss=loss, digest=digest_of(engine))
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(folder / "ckpt")
        time.sleep(0.01)
    # Ranks see the file a step apart, hence no close, which is a collective.
    os._exit(0)


def reference(
    slots: int, folder: str, load: str | None, saves: dict[int, str], steps: int
) -> dict[int, tuple[str, str]]:
    """An undisturbed run from scratch or from a checkpoint: the loss and the digest after each step, on rank 0."""
    import torch

    import zeroengine
    from zeroengine.comm.transports import shared_memory_file

    torch.set_num_threads(1)
    # Sums are taken within each host first, so the ranks have to be spread over as many here.
    host = f"node-{int(os.environ['RANK']) // slots}"
    shared_memory_file.host_identity = lambda: host
    engine = zeroengine.initialize(build(), config=CONFIG)
    torch.manual_seed(1 + int(os.environ["RANK"]))
    if load is not None:
        engine.load_checkpoint(folder, load)
    results = {engine.global_steps: ("", digest_of(engine))}
    while True:
        step = engine.global_steps
        if step in saves:
            engine.save_checkpoint(folder, saves[step])
        if step >= steps:
            engine.close()
            return results
        loss = take_step(engine)
        results[step + 1] = (loss, digest_of(engine))


def make_long(folder: Path, rng: random.Random) -> None:
    """Let a rank stay for a moment at each point of a snapshot, and show in a file that it is there."""
    from zeroengine.checkpoint.directory import CheckpointFolder
    from zeroengine.recovery import snapshots

    name = f"{os.environ['ZEROENGINE_HOST']}.{os.environ['RANK']}"

    @contextlib.contextmanager
    def at(point: str) -> Iterator[None]:
        mark = folder / "marks" / f"{point}.{name}"
        mark.touch()
        time.sleep(rng.uniform(0.01, LONGEST_S))
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    save_files, sendfile = snapshots.save_files, socket.socket.sendfile
    commit, remove, hide = CheckpointFolder.commit, CheckpointFolder.remove, CheckpointFolder.hide

    def long_save(*arguments: Any) -> Any:
        with at("files"):
            files = save_files(*arguments)
        with at("files"):
            return files

    def long_send(self: Any, file: Any, offset: int = 0, count: int | None = None) -> int:
        count = os.fstat(file.fileno()).st_size - offset if count is None else count
        sent = sendfile(self, file, offset, count // 2) if count // 2 else 0
        with at("sending"):
            return sent + sendfile(self, file, offset + sent, count - sent)

    def long_commit(self: Any, *arguments: Any) -> None:
        if self.path == folder / "ckpt":
            return commit(self, *arguments)
        with at("commit"):
            commit(self, *arguments)
        with at("committed"):
            return None

    def long_remove(self: Any, tags: Any) -> None:
        for tag in tags:
            with at("removal"):
                remove(self, [tag])

    def long_hide(self: Any, name: str) -> Any:
        with at("removal"):
            return hide(self, name)

    snapshots.save_files = long_save
    socket.socket.sendfile = long_send  # type: ignore[method-assign]
    CheckpointFolder.commit = long_commit  # type: ignore[method-assign]
    CheckpointFolder.remove = long_remove  # type: ignore[method-assign]
    CheckpointFolder.hide = long_hide  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
