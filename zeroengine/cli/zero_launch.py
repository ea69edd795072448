"""The command `zero-launch`: starts a script in several processes, one rank each, on this machine or on several."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from zeroengine.cli.launch_options import check, parse
from zeroengine.cli.parser import run_command
from zeroengine.errors import LaunchError
from zeroengine.launch.cluster import environment, shells
from zeroengine.launch.cluster.hosts import Host, limit, processes, read_hostfile, select
from zeroengine.launch.local import job
from zeroengine.launch.local.masking import is_secret, masked
from zeroengine.utils.launcher_environment import START_AGAIN


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: that of the first rank that failed, or 2 for a wrong request."""
    open_standard_descriptors()
    return run_command("zero-launch", lambda: launch(parse(sys.argv[1:] if argv is None else argv)))


def open_standard_descriptors() -> None:
    """Open /dev/null for stdin, stdout and stderr that are closed, before other files or sockets get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def launch(options: argparse.Namespace) -> int:
    check(options)
    launchers = {"local": local, "ssh": over_ssh, "slurm": in_slurm, "mpi": under_mpi, "k8s": for_k8s, "ray": on_ray}
    return launchers[options.launcher](options)


def local(options: argparse.Namespace) -> int:
    """All ranks on this machine."""
    request = job.build(
        options.script,
        options.arguments,
        module=options.module,
        nproc=options.nproc,
        cpu=options.cpu,
        config=options.config,
        overrides=options.set,
        extra=environment.extra(options.env),
        bind=options.bind,
    )
    if options.dry_run:
        print(request.describe(options.port))
        return 0
    make_log_dir(options.log_dir)

    from zeroengine.launch.local import agent  # imports torch's elastic agent, which takes its time
    from zeroengine.launch.local.console import Console
    from zeroengine.launch.local.failure_report import report
    from zeroengine.launch.local.pipes import Pipes
    from zeroengine.launch.local.rendezvous import Place, Rendezvous

    console, run_id = Console(options.log_dir), uuid.uuid4().hex
    width = len(str(request.nproc - 1))
    for restart in range(options.max_restarts + 1):
        console.assign([f"rank {rank:>{width}}" for rank in range(request.nproc)], terminal=True)
        place = Place(request.nproc, job.HOST, options.port, restart=restart, run_id=run_id)
        rendezvous = Rendezvous(place, listen(options.port))
        with Pipes(request.nproc, console.feed, console.flush, console.terminals()) as pipes:
            outcome = agent.run(request, pipes, rendezvous)
            console.finish()
        sys.stderr.write(report(outcome, console))
        if not outcome.failures or outcome.is_final or restart == options.max_restarts:
            break
        print(f"zero-launch: restart {restart + 1} of {options.max_restarts}", file=sys.stderr, flush=True)
    return outcome.code


def listen(port: int) -> socket.socket:
    """Where the store of a run on this machine alone is served: nobody else can reach it there."""
    from zeroengine.launch.local import network

    try:
        return network.listen(port, job.HOST)
    except OSError as error:
        raise LaunchError(str(error)) from None


def over_ssh(options: argparse.Namespace) -> int:
    """Ranks on the hosts of a file."""
    hosts = select(read_hostfile(options.hostfile), options.include, options.exclude)
    return on_nodes(options, hosts, shells.ssh(options.ssh, options.connect_timeout))


def in_slurm(options: argparse.Namespace) -> int:
    """Ranks on the hosts of the allocation that we are in, or a batch script that makes one."""
    from zeroengine.launch.schedulers import slurm

    if not options.submit:
        hosts = select(slurm.allocated(os.environ), options.include, options.exclude)
        code = on_nodes(options, hosts, shells.srun())
        if code == START_AGAIN:
            print(f"zero-launch: {slurm.requeue(os.environ)}", file=sys.stderr, flush=True)
        return code
    nodes = options.nnodes or ""
    low, _, high = nodes.rpartition(":")
    if not high.isdecimal():
        raise LaunchError(f"--submit: on how many nodes? Write --nnodes 2, or a range; found {nodes or 'none'}")
    (job.find_module if options.module else job.find_script)(options.script)
    job.check_config(options.config, options.set)
    gpus = int(options.nproc) if options.nproc.isdecimal() and not options.cpu else None
    name = Path(options.script).stem
    more, elastic = split_sbatch(options.sbatch), low not in ("", high)
    words, hidden = in_the_job(options)
    slurm.check_export(more, hidden, os.environ)
    script = slurm.batch_script(name, int(high), gpus, more, words, elastic=elastic)
    print(script if options.dry_run else slurm.submit(script, Path(slurm.SCRIPT), hidden))
    return 0


def split_sbatch(text: str) -> list[str]:
    """The words of `--sbatch`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(
            f"--sbatch {text}: {str(error).lower()}. Write options of sbatch, such as --sbatch '--time=8:00:00'"
        ) from None


def in_the_job(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command line as the batch script repeats it, and variables that sbatch hands over instead of its text.

    The script is a file that stays, and Slurm keeps a copy: the values of variables that look secret are not in it.
    """
    cut = len(options.argv) - len(options.arguments) - 1
    own, words, hidden = iter(options.argv[:cut]), [], {}
    for word in own:
        option, equals, value = word.partition("=")
        if option == "--env":
            value = value if equals else next(own)
            name, text = environment.parse(value, "--env", os.environ)
            if is_secret(name, text):
                value, hidden[name] = name, text
            words += ["--env", value]
        elif option not in ("--submit", "--dry-run", "--sbatch"):
            words.append(word)
    return words + options.argv[cut:], hidden


def under_mpi(options: argparse.Namespace) -> int:
    """This process is a rank that mpirun has started: it becomes the script."""
    from zeroengine.launch.schedulers import mpi

    given = mpi.adapted(os.environ, options.master_addr, options.port)
    given |= job.environment(options.cpu, options.config, options.set) | environment.extra(options.env)
    if "OMP_NUM_THREADS" not in os.environ | given and "LOCAL_WORLD_SIZE" in given:
        given["OMP_NUM_THREADS"] = job.threads(int(given["LOCAL_WORLD_SIZE"]))
    command = job.command(options.script, options.arguments, options.module)
    if options.dry_run:
        print(shlex.join(["env", *(f"{key}={value}" for key, value in masked(given).items()), *command]))
        return 0
    (job.find_module if options.module else job.find_script)(options.script)
    os.execve(command[0], command, os.environ | given)


def for_k8s(options: argparse.Namespace) -> int:
    """A manifest; Kubernetes does the rest."""
    from zeroengine.launch.schedulers import kubernetes

    here = options.config is not None and os.path.isfile(options.config)
    job.check_config(options.config if here else None, options.set)  # else it is in the image alone
    given = environment.extra(options.env)
    if options.config is not None:
        given["ZEROENGINE_CONFIG"] = options.config  # as the image has it
    if options.set:
        given["ZEROENGINE_OVERRIDES"] = json.dumps(options.set)
    words = [*(["-m"] if options.module else []), options.script, *options.arguments]
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    nodes = options.nnodes or "1"
    arguments = (options.kind or "PyTorchJob", name, options.image, nodes, options.nproc, words, given)
    text, notices = kubernetes.manifest(*arguments, cpu=options.cpu, restarts=options.max_restarts)
    for notice in notices:
        print(f"zero-launch: {notice}", file=sys.stderr)
    print(text, end="")
    return 0


def on_ray(options: argparse.Namespace) -> int:
    """Workers of a Ray cluster."""
    from zeroengine.launch.schedulers import ray

    ray.check()
    if not options.nproc.isdecimal():
        raise LaunchError("--launcher ray: how many workers? Write --nproc 8 for 8 in the whole cluster")
    (job.find_module if options.module else job.find_script)(options.script)
    job.check_config(options.config, options.set)
    given = job.environment(options.cpu, options.config, options.set) | environment.collect(options.env)
    words = [*(["-m"] if options.module else []), options.script, *options.arguments]
    if options.dry_run:
        with_gpu = "" if options.cpu else ", with a GPU each"
        print(f"# Ray Train: {options.nproc} workers{with_gpu}, max_failures={options.max_restarts}. In each:")
        print(shlex.join(["env", *(f"{key}={value}" for key, value in masked(given).items()), "python", *words]))
        return 0
    return ray.run(words, int(options.nproc), not options.cpu, given, options.max_restarts)


def on_nodes(options: argparse.Namespace, hosts: Sequence[Host], shell: shells.Shell) -> int:
    """A node's agent on each host, which the launcher looks after."""
    from zeroengine.launch.cluster import restart_loop
    from zeroengine.launch.cluster.nodes import Fleet
    from zeroengine.launch.cluster.request import Request
    from zeroengine.launch.local.console import Console
    from zeroengine.launch.local.failure_report import report

    hosts, least = limit(hosts, options.nnodes)
    for host in hosts:
        processes(host, options.nproc)
    (job.find_module if options.module else job.find_script)(options.script)
    if options.config is not None and not os.path.isfile(options.config):
        job.check_config(options.config, options.set)  # says so; what is in it a node checks, which has torch at hand
    request = Request(
        hosts,
        least,
        shell,
        folder=os.getcwd(),
        target=options.script,
        arguments=options.arguments,
        module=options.module,
        nproc=options.nproc,
        cpu=options.cpu,
        environment=environment.collect(options.env),
        ranks_environment=job.environment(options.cpu, options.config, options.set),
        config=None if options.config is None else os.path.abspath(options.config),
        overrides=options.set,
        address=options.master_addr,
        port=options.port,
        bind=options.bind,
        restarts=options.max_restarts,
        idle_rounds=options.max_idle_rounds,
        silence=options.node_timeout,
        connect_timeout=options.connect_timeout,
        import_timeout=options.import_timeout,
        fan_out=options.fan_out,
        run_id=uuid.uuid4().hex,
    )
    if options.dry_run:
        from zeroengine.launch.cluster.dry_run import describe

        job.check_config(options.config, options.set)
        print(describe(request))
        return 0
    shell.find()
    make_log_dir(options.log_dir)
    console = Console(options.log_dir)
    with Fleet(request, console) as fleet:
        outcome = restart_loop.run(request, fleet, console)
        console.finish()
    console.say(report(outcome, console))
    return outcome.code


def make_log_dir(folder: Path | None) -> None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {folder}: cannot be made a folder for logs ({error.strerror})") from None


if __name__ == "__main__":
    sys.exit(main())
