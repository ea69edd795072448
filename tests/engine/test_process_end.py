"""Processes that end with an engine, and forked children of processes that have one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks

# One process imports torch and forks the ranks, which end as interpreters do.
SCRIPT = """
import gc, os, signal, socket, sys
import torch, torch.distributed
from torch import nn
import zeroengine, zeroengine.engine.engine, zeroengine.checkpoint.writer

def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]), WORLD_SIZE="3")
# The collections at the end of a process would walk over all modules, and so copy them.
gc.collect()
gc.freeze()
ranks = []
for rank in range(3):
    pid = os.fork()
    if pid == 0:
        break
    ranks.append(pid)
if len(ranks) == 3:
    print([exit_code(pid) for pid in ranks])
    sys.exit()
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
torch.set_num_threads(1)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "checkpoint": {"on_signal": "SIGUSR1", "directory": sys.argv[1]},
    "monitor": {"folder": sys.argv[2]},
}
engine = zeroengine.initialize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), config=config)
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
# Threads that run late have the tensors of a collective for longer.
for thread in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{thread}/comm") as name:
        if "gloo" in name.read():
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)
child = os.fork()
if child == 0:
    # A hang ends this child with another code.
    signal.alarm(60)
    steps = engine.global_steps
    try:
        engine.save_checkpoint(sys.argv[1])
    except zeroengine.ZeroEngineError as error:
        refused = f"belongs to process {os.getppid()}" in str(error)
    engine.close()
    sys.exit(7 if refused and steps == 1 else 8)
code = exit_code(child)
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
if code != 7:
    raise SystemExit(f"the forked child ended with {code}")
engine.wait_for_checkpoint()
"""


def test_ranks_end_well_after_a_save_and_a_forked_child_owns_nothing(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("checkpoints", "run")]
    # Python 3.12 warns of forks with threads.
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *folders]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.stdout.splitlines()[-1:] == ["[0, 0, 0]"], ended.stdout + ended.stderr
    assert (tmp_path / "checkpoints" / "step-1" / "zeroengine.json").exists()


def count_threads() -> tuple[int, int]:
    """Return the numbers of Gloo's threads that run collectives, and of Python's threads."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names), threading.active_count()


def threads_before_and_after_an_engine(folder: str) -> list[tuple[int, int]]:
    torch.distributed.init_process_group("gloo")
    # The first collective starts the threads of the user's own group.
    torch.distributed.barrier()
    before = count_threads()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "checkpoint": {"on_signal": "SIGUSR1", "directory": folder},
        "monitor": {"folder": f"{folder}/run"},
        "comm": {"transport": "gloo"},
    }
    model = nn.Linear(8, 1)
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.close()
    return [before, count_threads()]


def test_no_thread_outlives_a_closed_engine(tmp_path: Path) -> None:
    for before, after in run_ranks(2, threads_before_and_after_an_engine, str(tmp_path)):
        assert after == before
