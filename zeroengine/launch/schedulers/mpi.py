"""MPI: mpirun has started this process as one rank of many; its environment becomes torch.distributed's."""

from __future__ import annotations

from collections.abc import Mapping

from zeroengine.errors import LaunchError
from zeroengine.utils.launcher_environment import launched_rank, torch_variables


def adapted(environ: Mapping[str, str], address: str | None = None, port: int = 0) -> dict[str, str]:
    """The variables that a rank is given.

    Args:
        address: of rank 0's host; found where all ranks are on one host, or Slurm says.
        port: of the store there; one made of the job's id where 0.

    Raises:
        LaunchError: MPI has not started this process, or rank 0's address is nowhere to be found.
    """
    launched = launched_rank(environ)
    if launched is None:
        raise LaunchError(
            "--launcher mpi: MPI has not started this process. Write mpirun -n 4 zero-launch --launcher mpi ..."
        )
    variables = torch_variables(launched, environ, address, port)
    if "MASTER_ADDR" not in variables:
        raise LaunchError(
            "--launcher mpi: on several hosts, where is rank 0? Add --master-addr with the first host's address"
        )
    return variables
