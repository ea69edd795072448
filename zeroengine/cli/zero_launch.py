"""The command `zero-launch`: start a script in several processes, one rank each, on this machine or on several.

Modules that need torch are imported once the request is known to be right.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zeroengine.cli.launch_options import check_options, parse_arguments
from zeroengine.cli.parser import command
from zeroengine.errors import LaunchError
from zeroengine.integrations import as_deepspeed
from zeroengine.launch.cluster.environment import explicit_variables, forwarded_variables
from zeroengine.launch.cluster.hosts import Host, limit_hosts, processes_on, read_hostfile, select_hosts
from zeroengine.launch.cluster.shells import RemoteShell, srun_shell, ssh_shell
from zeroengine.launch.local import job
from zeroengine.launch.local.core_binding import cores_by_rank
from zeroengine.launch.local.worker import BIND_VARIABLE
from zeroengine.monitor.run_folder import RUN_FOLDER_VARIABLE
from zeroengine.utils.launcher import RESTART_EXIT_CODE

if TYPE_CHECKING:
    from zeroengine.launch.local.console import Console
    from zeroengine.launch.local.run_events import LauncherEvents


@command("zero-launch")
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: that of the first rank that failed, or 2 for a wrong request."""
    # This comes first: a socket or pipe that got the number of a closed stdout would receive whatever is printed.
    open_standard_descriptors()
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    check_options(options)
    launchers = {
        "local": launch_locally,
        "ssh": launch_over_ssh,
        "slurm": launch_under_slurm,
        "mpi": launch_under_mpi,
        "k8s": print_kubernetes_manifest,
        "ray": launch_on_ray,
    }
    return launchers[options.launcher](options)


def open_standard_descriptors() -> None:
    """Open /dev/null for stdin, stdout and stderr that are closed, before other files or sockets get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives out the lowest free number, which is usually the closed one itself.
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            # Descriptors of Python are not inherited by default, but the ranks expect these three.
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def launch_locally(options: argparse.Namespace) -> int:
    """Run all ranks on this machine."""
    # The checks are ordered by their cost. The last one imports torch.
    job.check_target(options.words)
    nproc = job.count_processes(options.nproc, options.cpu)
    environment = inherited_variables(options, nproc)
    if options.bind is not None:
        environment[BIND_VARIABLE] = cores_by_rank(options.bind, nproc)
    job.check_config(options.config, options.set)
    local_job = job.Job(nproc, job.worker_command(options.words), environment)
    # A dry run imports neither torch nor anything of the launcher's machinery.
    if options.dry_run:
        print(local_job.describe(options.port or job.DRY_RUN_PORT))
        return 0

    from zeroengine.launch.local import agent, network, pipes, rank, rendezvous
    from zeroengine.launch.local.failure_report import failure_report
    from zeroengine.launch.local.repeated_failures import count_equal_failures
    from zeroengine.launch.local.snapshot_folder import SnapshotFolder

    # All restarts share one id: later rounds of a run may take over the lock of a folder of checkpoints from earlier
    # ones.
    (console, events), run_id = open_console(options), uuid.uuid4().hex
    # What the ranks of one round keep in memory is for those of the next one.
    snapshot_folder = SnapshotFolder()
    local_job.environment.update(snapshot_folder.environment)
    port, width, outcome = options.port, len(str(nproc - 1)), rank.RunOutcome()
    for restart in range(options.max_restarts + 1):
        console.assign([f"rank {rank:>{width}}" for rank in range(nproc)], terminal=True)
        assignment = rendezvous.NodeAssignment(nproc, job.LOOPBACK, port, restart=restart, run_id=run_id)
        # Each round has a new store, since the old one holds keys of ranks that have ended.
        handler = rendezvous.Rendezvous(assignment, network.open_listener(port, job.LOOPBACK))
        with pipes.Pipes(nproc, console.feed, console.flush, console.terminals()) as outputs:
            outcome = count_equal_failures(outcome, agent.run_ranks(local_job, outputs, handler))
            console.finish()
        events.append_outcome(outcome)
        # A request for a restart by the script itself, a signal and a repeated failure end the loop as success does.
        is_last = not outcome.failures or outcome.is_final or restart == options.max_restarts
        if is_last:
            console.close()
        # The report comes last on the screen.
        console.print_own(failure_report(outcome, console))
        if is_last:
            break
        notice = f"restart {restart + 1} of {options.max_restarts}"
        events.append("restart", notice)
        console.print_own(f"zero-launch: {notice}\n")
    snapshot_folder.remove()
    return outcome.code


def open_console(options: argparse.Namespace) -> tuple[Console, LauncherEvents]:
    """Return where the ranks' output goes, and where restarts and failures are noted."""
    from zeroengine.launch.local.console import STDERR, Console
    from zeroengine.launch.local.run_events import LauncherEvents

    if options.run_folder is None:
        return Console(options.log_dir), LauncherEvents()
    # It needs rich, which most runs start without.
    from zeroengine.view.live_line import LiveLine

    folder = Path(options.run_folder).absolute()
    # The folder is made, or refused, before anything else begins.
    events = LauncherEvents(folder)
    return Console(options.log_dir, LiveLine(folder, STDERR, not options.no_live)), events


def launch_over_ssh(options: argparse.Namespace) -> int:
    """Run ranks on the hosts of a hostfile."""
    hosts = select_hosts(read_hostfile(options.hostfile), options.include, options.exclude)
    return launch_on_hosts(options, hosts, ssh_shell(options.ssh, options.connect_timeout))


def launch_under_slurm(options: argparse.Namespace) -> int:
    """Run ranks on the hosts of the Slurm allocation that contains this process."""
    from zeroengine.launch.schedulers import slurm

    hosts = select_hosts(slurm.allocated_hosts(os.environ), options.include, options.exclude)
    code = launch_on_hosts(options, hosts, srun_shell())
    # The ranks have saved and ended because the job's time is nearly over, so the job goes back to the queue.
    if code == RESTART_EXIT_CODE:
        print(f"zero-launch: {slurm.requeue(os.environ)}", file=sys.stderr, flush=True)
    return code


def launch_under_mpi(options: argparse.Namespace) -> int:
    """Become the script: mpirun has started this process as a rank."""
    from zeroengine.launch.schedulers.mpi import mpi_rank_variables

    variables = mpi_rank_variables(os.environ, options.master_addr, options.port)
    variables |= inherited_variables(options, int(variables.get("LOCAL_WORLD_SIZE", 0)))
    command = job.worker_command(options.words)
    if options.dry_run:
        print(job.shell_line(variables, command))
        return 0
    job.check_target(options.words)
    # The process is replaced, so that signals and exit codes of mpirun reach the script directly.
    os.execve(command[0], command, os.environ | variables)


def print_kubernetes_manifest(options: argparse.Namespace) -> int:
    """Print a manifest, from which Kubernetes starts the ranks."""
    from zeroengine.launch.schedulers.kubernetes import build_manifest

    # A configuration that only the image contains cannot be checked here.
    is_here = options.config is not None and os.path.isfile(options.config)
    job.check_config(options.config if is_here else None, options.set)
    variables = explicit_variables(options.env) | job.rank_environment(cpu=False, config=None, overrides=options.set)
    if options.config is not None:
        # The path is meant as it is in the image, so that it is not made absolute here.
        variables["ZEROENGINE_CONFIG"] = options.config
    if options.run_folder is not None:
        variables[RUN_FOLDER_VARIABLE] = options.run_folder
    text, notices = build_manifest(
        options.kind or "PyTorchJob",
        options.words[1].rpartition(".")[2] if options.module else Path(options.words[0]).stem,
        options.image,
        options.nnodes or "1",
        options.nproc,
        options.words,
        variables,
        cpu=options.cpu,
        restarts=options.max_restarts,
    )
    for notice in notices:
        print(f"zero-launch: {notice}", file=sys.stderr)
    print(text, end="")
    return 0


def launch_on_ray(options: argparse.Namespace) -> int:
    """Run ranks as workers of a Ray cluster."""
    from zeroengine.launch.schedulers import ray

    ray.check_installed()
    if not options.nproc.isdecimal():
        raise LaunchError("--launcher ray: how many workers? Write --nproc 8 for 8 in the whole cluster")
    job.check_target(options.words)
    job.check_config(options.config, options.set)
    # Workers of Ray start on other machines, with an environment of their own.
    variables = job.rank_environment(options.cpu, options.config, options.set, options.run_folder)
    variables |= forwarded_variables(options.env)
    if options.dry_run:
        with_gpu = "" if options.cpu else ", with a GPU each"
        print(f"# Ray Train: {options.nproc} workers{with_gpu}, max_failures={options.max_restarts}. In each:")
        print(job.shell_line(variables, ["python", *options.words]))
        return 0
    return ray.run_on_ray(options.words, int(options.nproc), not options.cpu, variables, options.max_restarts)


def launch_on_hosts(options: argparse.Namespace, hosts: Sequence[Host], shell: RemoteShell) -> int:
    """Start an agent on each host, which starts the host's ranks, and look after all of them."""
    from zeroengine.launch.cluster.nodes import Nodes
    from zeroengine.launch.cluster.request import ClusterRequest
    from zeroengine.launch.cluster.restart_loop import run_cluster
    from zeroengine.launch.local.failure_report import failure_report

    hosts, min_nodes = limit_hosts(hosts, options.nnodes)
    # A host with too few slots is reported before any connection is made.
    for host in hosts:
        processes_on(host, options.nproc)
    job.check_target(options.words)
    if options.config is not None and not os.path.isfile(options.config):
        # Reports the missing file. The first node checks the content, since its process imports torch anyway.
        job.check_config(options.config, options.set)
    environment = forwarded_variables(options.env)
    request = ClusterRequest(
        hosts,
        min_nodes,
        shell,
        folder=os.getcwd(),
        words=options.words,
        nproc=options.nproc,
        cpu=options.cpu,
        environment=environment | variables_as_deepspeed(options, environment),
        ranks_environment=job.rank_environment(options.cpu, options.config, options.set, options.run_folder),
        config=None if options.config is None else os.path.abspath(options.config),
        overrides=options.set,
        address=options.master_addr,
        port=options.port,
        bind=options.bind,
        max_restarts=options.max_restarts,
        max_idle_rounds=options.max_idle_rounds,
        node_timeout_s=options.node_timeout,
        connect_timeout_s=options.connect_timeout,
        import_timeout_s=options.import_timeout,
        fan_out=options.fan_out,
        run_id=uuid.uuid4().hex,
    )
    if options.dry_run:
        from zeroengine.launch.cluster.dry_run import describe_run

        job.check_config(options.config, options.set)
        print(describe_run(request))
        return 0
    # A missing ssh or srun is reported once, rather than by every connection.
    shell.check_installed()
    console, events = open_console(options)
    with Nodes(request, console) as nodes:
        outcome = run_cluster(request, nodes, console, events)
        console.finish()
    events.append_outcome(outcome)
    console.close()
    console.print_own(failure_report(outcome, console))
    return outcome.code


def inherited_variables(options: argparse.Namespace, processes: int) -> dict[str, str]:
    """Return the variables of ranks that have this process's environment as well.

    Args:
        options: The request.
        processes: The number of ranks on this machine; 0 if it is not known.
    """
    variables = job.rank_environment(options.cpu, options.config, options.set, options.run_folder)
    variables |= explicit_variables(options.env)
    variables |= variables_as_deepspeed(options, os.environ | variables)
    # Without a limit every rank would use all cores of the node.
    if processes and "OMP_NUM_THREADS" not in os.environ | variables:
        variables["OMP_NUM_THREADS"] = job.omp_threads(processes)
    return variables


def variables_as_deepspeed(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which `deepspeed` is zeroengine in the ranks, or none."""
    if options.as_deepspeed is None:
        return {}
    return {"PYTHONPATH": as_deepspeed.python_path(options.as_deepspeed, environ)}


if __name__ == "__main__":
    sys.exit(main())
