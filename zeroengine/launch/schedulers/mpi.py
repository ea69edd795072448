"""Turn the environment of a rank that mpirun has started into torch.distributed's."""

from __future__ import annotations

from collections.abc import Mapping

from zeroengine.errors import LaunchError
from zeroengine.utils.launcher import launched_rank, torch_variables


def mpi_rank_variables(environ: Mapping[str, str], address: str | None = None, port: int = 0) -> dict[str, str]:
    """Return torch.distributed's variables for this rank.

    Args:
        environ: The environment that mpirun has set.
        address: The address of rank 0's host. It is found if all ranks are on one host, or if Slurm names it.
        port: The port of the store there; 0 for a port derived from the job's id.

    Raises:
        LaunchError: MPI has not started this process, or rank 0's address cannot be found.
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
