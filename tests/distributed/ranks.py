"""Runs a function on several real processes that talk over Gloo, and gives back what each returned.

Processes fork from a server that has torch imported already, so a run costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.emulated import emulate_gpu, share_gpu, wanted

_context = mp.get_context("forkserver")
# torch.optim's constructors import torch._dynamo, which takes longer than most tests. The engine imports the modules
# after it where they are first needed.
_PRELOADED = [
    "tests.emulated.first",
    "torch._dynamo",
    "torch.distributed",
    "zeroengine.engine.engine",
    "zeroengine.checkpoint.restore",
    "zeroengine.checkpoint.search",
    "zeroengine.checkpoint.writer",
    "zeroengine.engine.out_of_memory",
    "zeroengine.engine.weight_stream",
    "zeroengine.monitor.flops",
    "zeroengine.recovery.snapshots",
    "zeroengine.weights.live_loads",
    "zeroengine.weights.live_weights",
    "pytest",
    "tests.distributed.models",
    "tests.distributed.checked_configuration",
]
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")  # before a test hides them
sharing_gpu = False  # whether ranks compute on a GPU without being asked to
LEAVE_TIMEOUT_S = 2.0  # how long a rank that has answered waits for the others to answer, too


def preload(*modules: str) -> None:
    """Let the server import `modules`, too. Call it before the first run."""
    # The last one freezes what the others imported.
    _context.set_forkserver_preload([*_PRELOADED, *modules, "tests.distributed.frozen_modules"])


preload()


class RankFailed(AssertionError):
    """A rank raised; carries its type's name and message."""

    def __init__(self, failures: dict[int, tuple[str, str, str]]) -> None:
        self.failures = failures
        lines = [f"rank {rank} raised {kind}: {text}\n{trace}" for rank, (kind, text, trace) in failures.items()]
        super().__init__("\n".join(lines))


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 90.0, missing: tuple[int, ...] = ()
) -> list[Any]:
    """``[function(*args) on rank 0, on rank 1, ...]``.

    Args:
        function: at module level; finds its rank by ``torch.distributed``'s environment variables.
        missing: ranks whose process may end without an answer (killed by the test).

    Raises:
        RankFailed: some rank raised, died or did not answer in time.
    """
    port = _free_port()
    processes, pipes = [], {}
    for rank in range(world_size):
        mine, theirs = _context.Pipe()
        gpus = GPUS if sharing_gpu else os.environ.get("CUDA_VISIBLE_DEVICES")
        started = (theirs, rank, world_size, port, function, args, gpus, sharing_gpu)
        process = _context.Process(target=_run, args=started, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes[mine] = rank
    answers = _collect(pipes, timeout)
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    failures = {rank: answer[1:] for rank, answer in answers.items() if answer[0] == "raised"}
    for rank in set(range(world_size)) - set(answers) - set(missing):
        failures[rank] = ("NoAnswer", f"exit code {processes[rank].exitcode}", "")
    if failures:
        raise RankFailed(dict(sorted(failures.items())))
    return [answers[rank][1] if rank in answers else None for rank in range(world_size)]


def _free_port() -> int:
    """A free port below those that the system gives to connections: one of these could take it before the ranks do."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _collect(pipes: dict[Connection, int], timeout: float) -> dict[int, tuple[Any, ...]]:
    answers: dict[int, tuple[Any, ...]] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(pipes)
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())  # not torch's reductions: the sender ends
            except EOFError:
                pass  # died
        if any(answer[0] == "raised" for answer in answers.values()):
            deadline = min(deadline, time.monotonic() + 20)
    return answers


def on_cpu(answer: Any) -> Any:
    """The same, for a process without a GPU."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, found: Any) -> Any:
            if isinstance(found, torch.Tensor) and found.is_cuda:
                return found.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return NotImplemented

    file = io.BytesIO()
    Pickler(file).dump(answer)
    return pickle.loads(file.getvalue())


def _run(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: Any,
    gpus: str | None,
    sharing_gpu: bool,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the server's, which is that of the test that started it
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    import torch

    torch.set_num_threads(1)
    if wanted() == "emulated":
        emulate_gpu()
    if sharing_gpu:
        share_gpu(rank)
    try:
        answer = function(*args)
        pipe.send_bytes(pickle.dumps(("returned", on_cpu(answer) if sharing_gpu else answer)))
        # A peer may still be accepting this rank's last connection, and Gloo fails there if the process is gone.
        pipe.poll(LEAVE_TIMEOUT_S)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(("raised", type(error).__name__, str(error), traceback.format_exc())))
    pipe.close()
    os._exit(0)
