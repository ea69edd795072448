"""Find the ranks that a process joins in its environment, as torchrun and zero-launch or mpirun and srun set it."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.launcher import launched_rank, torch_variables

log = logging.getLogger("zeroengine")


def has_peers() -> bool:
    """Return whether torch.distributed's variables say that this process is one rank of several.

    Raises:
        ZeroEngineError: Some of the variables are missing.
    """
    # A rank without a world size, or a world size without a rank, is a mistake that training alone would hide.
    present = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    if not present or os.environ.get("WORLD_SIZE") == "1":
        return False
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise ZeroEngineError(
            f"the environment has {' and '.join(present)}, and not {', '.join(missing)}: which ranks does this "
            "process belong to? Start the script with zero-launch or torchrun, which set all of them; or set all; or "
            "none, for one process alone."
        )
    return True


def join_launched_ranks() -> None:
    """Set torch.distributed's variables from mpirun's or srun's, where they started several processes.

    Otherwise each process would train a copy of its own. This does nothing if torch.distributed is running or its
    variables are set. The shell of a Slurm allocation is no rank: only the tasks of a step are.

    Raises:
        ZeroEngineError: Nothing says where rank 0 is, or some of torch.distributed's variables are missing.
    """
    # WORLD_SIZE=1 is how a user asks for a run of its own in each process.
    if dist.is_initialized() or has_peers() or os.environ.get("WORLD_SIZE"):
        return
    launched = launched_rank(os.environ)
    # A single task needs no address of rank 0.
    if launched is None or launched.world_size == 1:
        return
    variables = torch_variables(launched, os.environ)
    if "MASTER_ADDR" not in variables:
        raise ZeroEngineError(
            f"{launched.launcher} started {launched.world_size} processes, and nothing says on which host rank 0 is. "
            f"Write {launched.launcher} -n {launched.world_size} zero-launch --launcher mpi --master-addr HOST "
            "train.py with the first host's address, or set MASTER_ADDR and MASTER_PORT. For a run of its own in each "
            "process set RANK=0 and WORLD_SIZE=1."
        )
    os.environ.update(variables)
    # The user may have meant independent runs, so one rank logs that they are joined.
    if launched.rank == 0:
        log.warning(
            "training on the %d processes that %s started, as one run, through %s:%s. For a run of its own in each "
            "process set RANK=0 and WORLD_SIZE=1.",
            launched.world_size,
            launched.launcher,
            variables["MASTER_ADDR"],
            variables["MASTER_PORT"],
        )
