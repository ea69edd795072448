"""Define the command line of zero-launch: its options, and which of them make sense together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from zeroengine.cli.parser import CommandParser
from zeroengine.errors import LaunchError
from zeroengine.launch.cluster import protocol
from zeroengine.launch.local.core_binding import BIND_KINDS
from zeroengine.migration.launch_options import SWITCHES, VALUES, advice_of
from zeroengine.utils.files import in_home, path_argument

LAUNCHERS = ("local", "ssh", "slurm", "mpi", "k8s", "ray")
# The launchers under which an option has an effect. Options that are not listed have one under all launchers.
HONORED_BY = {
    option: launchers
    for options, launchers in (
        (("nproc", "max_restarts"), ("local", "ssh", "slurm", "k8s", "ray")),
        (("port",), ("local", "ssh", "slurm", "mpi")),
        (("bind", "log_dir", "no_live"), ("local", "ssh", "slurm")),
        (("nnodes",), ("ssh", "slurm", "k8s")),
        (("master_addr",), ("ssh", "slurm", "mpi")),
        (("include", "exclude", "node_timeout", "max_idle_rounds"), ("ssh", "slurm")),
        # The folder's path is the same on all nodes, as those of the script and the environment are.
        (("as_deepspeed",), ("local", "ssh", "slurm", "mpi")),
        (("connect_timeout", "import_timeout", "fan_out"), ("ssh", "slurm")),
        (("hostfile", "ssh"), ("ssh",)),
        (("image", "kind"), ("k8s",)),
    )
    for option in options
}
# These sentences say what does the work of an option that a launcher does not honor.
ALTERNATIVES = {
    "mpi": "mpirun does that, with options of its own (see mpirun --help)",
    "k8s": "Kubernetes does that: edit the manifest",
    "ray": "Ray does that",
}
USAGE = "zero-launch [options] script.py [arguments of the script]"
EXAMPLES = """\
examples:
  zero-launch train.py                                   a process per GPU, or two on the CPU
  zero-launch --nproc 4 --config zero3.json train.py     four processes; initialize() reads zero3.json
  zero-launch --set zero_optimization.stage=3 train.py   one value of the configuration, replaced
  zero-launch -m package.train --epochs 3                a module, as with python -m
  zero-launch --hostfile hosts train.py                  on every host of the file, over ssh
  zero-launch --hostfile hosts --nnodes 2:3 train.py     going on while two of them are there
"""


def parser() -> CommandParser:
    """Return the parser of zero-launch's arguments."""
    about = "Start a script in several processes, one rank each, on this machine or on several."
    parser = CommandParser("zero-launch", USAGE, about, EXAMPLES)
    count: dict[str, Any] = {"metavar": "N", "type": int}
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add = parser.add_argument_group("the run").add_argument
    nproc = "processes a node: a number, or auto (its slots, else its GPUs, else 2)"
    add("--nproc", metavar="N", default="auto", help=nproc)
    add("--cpu", action="store_true", help="use no GPU, even where there are some")
    add("--config", metavar="FILE", help="the configuration that zeroengine.initialize reads: JSON, YAML or HJSON")
    add("--set", metavar="KEY=VALUE", **repeated, help="replace one value of it; may be repeated")
    add("--env", metavar="NAME=VALUE", **repeated, help="a variable for every rank; NAME for its value here")
    add("--bind", choices=BIND_KINDS, help="give each rank cores of its own, or those of one NUMA node")
    add("--max-restarts", **count, default=0, help="start the ranks again after a failure, N times at most")
    idle_rounds = "an elastic run ends when nodes were lost in so many rounds in a row before a step was taken (3)"
    add("--max-idle-rounds", **count, default=protocol.MAX_IDLE_ROUNDS, help=idle_rounds)
    add("-m", "--module", action="store_true", help="the script is a module's name, as with python -m")
    deepspeed = "`import deepspeed` is zeroengine in the ranks; =force also where DeepSpeed is installed"
    choices = ("absent", "force")
    add("--as-deepspeed", nargs="?", choices=choices, const="absent", metavar="=force", help=deepspeed)

    add = parser.add_argument_group("the nodes").add_argument
    add("--launcher", choices=LAUNCHERS, help="how to get there (default: ssh with a hostfile, else local)")
    add("--hostfile", metavar="FILE", help="a line for each host: name slots=N")
    add("--include", metavar="HOSTS", type=_or_none, help="only these hosts and slots, as in host1:0,2@host2")
    add("--exclude", metavar="HOSTS", type=_or_none, help="not these")
    add("--nnodes", metavar="N|MIN:MAX", help="nodes; with a range the run goes on while MIN of them are there")
    address = "where the other nodes reach the first one (default: its address for ssh)"
    add("--master-addr", metavar="ADDR", type=_or_none, help=address)
    add("--port", "--master-port", metavar="PORT", type=int, default=0, help="of the store there (default: a free one)")
    add("--ssh", metavar="COMMAND", help="instead of plain ssh, such as 'ssh -p 2222 -i key'")
    for name, default_s, purpose in (
        ("node", protocol.NODE_TIMEOUT_S, "silence after which a node is given up (10)"),
        ("connect", protocol.CONNECT_TIMEOUT_S, "for a connection to a node (30)"),
        ("import", protocol.IMPORT_TIMEOUT_S, "for a node's Python to import torch (120)"),
    ):
        add(f"--{name}-timeout", metavar="SECONDS", type=float, default=default_s, help=purpose)
    add("--fan-out", **count, default=protocol.FAN_OUT, help="connect to so many nodes at a time (64)")
    add("--image", metavar="NAME", help="k8s: the container image, with torch, zeroengine and the script")
    add("--kind", choices=("PyTorchJob", "TrainJob"), help="k8s: of the manifest (default: PyTorchJob)")

    add = parser.add_argument_group("output").add_argument
    logs = "also write each rank's output to DIR/rank0.log, DIR/rank1.log, ..."
    add("--log-dir", metavar="DIR", type=path_argument, help=logs)
    folder = "the ranks' zeroengine writes each step into DIR, for zero-view; a line shows how the run goes"
    add("--run-folder", metavar="DIR", type=in_home, help=folder)
    add("--no-live", action="store_true", help="with --run-folder: plain lines, also on a terminal")
    add("--dry-run", action="store_true", help="print what would be started, per rank, and start nothing")
    # The script and its arguments are one positional argument: between two of them argparse would drop a "--".
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _or_none(text: str) -> str | None:
    """Return the value of an option whose default DeepSpeed's command lines write as an empty string."""
    return text or None


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with the `words` of the script: the script, or `-m` and the module, and its arguments."""
    launch_parser = parser()
    options = launch_parser.parse_args(_checked_words(argv, launch_parser))
    # A leading "--" only separates the script from the options, and is no argument of the script.
    words = options.command[options.command[:1] == ["--"] :]
    options.words = ["-m", *words] if options.module and words else words
    return options


def _checked_words(argv: Sequence[str], launch_parser: CommandParser) -> list[str]:
    """Return the words for argparse; refuse options of torchrun, deepspeed and accelerate launch, and misspelt ones.

    A bare `--as-deepspeed` gets its default, since argparse would take the script for its value.

    Raises:
        LaunchError: There are some before the script. The message has what to write instead of each.
    """
    own = {name: action for action in launch_parser._actions for name in action.option_strings}
    words, problems, rest = [], [], list(argv)
    # The script ends the options, and what comes after it belongs to the script.
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option, equals, text = rest[0].partition("=")
        name = option.lstrip("-").replace("_", "-")
        action, advice = own.get(option, own.get(f"--{name}")), None
        if action is None and advice_of(name, None) is None:
            near = get_close_matches(option, own, n=1, cutoff=0.75)
            if not near:
                # argparse reports an option that nobody knows.
                break
            action, advice = own[near[0]], f"there is no such option. Did you mean {near[0]}?"
        takes_value = name not in SWITCHES if action is None else action.nargs is None
        words.append("--as-deepspeed=absent" if rest[0] == "--as-deepspeed" else rest[0])
        del rest[0]
        value = text if equals else rest.pop(0) if takes_value and rest else None
        words += [] if equals or value is None else [value]
        if option in own:
            advice = VALUES.get((name, value or ""))
        elif advice is None:
            advice = f"write --{name} {value or ''}".rstrip() if action is not None else advice_of(name, value)
        if advice is not None:
            problems.append(f"{option}{'' if value is None else f' {value}'}: {advice}")
    if len(problems) > 1:
        raise LaunchError("\n  ".join(["there are no such options here:", *problems]))
    if problems:
        end = "" if problems[0].endswith("?") else "."
        raise LaunchError(f"{problems[0]}{end} Usage: {USAGE}")
    return words + rest


def check_options(options: argparse.Namespace) -> None:
    """Check that the options make sense, alone and together, and set `options.launcher`.

    Raises:
        LaunchError: They do not; the message says what to write instead.
    """
    # A hostfile says that the run has several hosts, so ssh is the natural default then.
    launcher = options.launcher or ("ssh" if options.hostfile else "local")
    if not options.words:
        raise LaunchError(f"there is no script to run. Write {USAGE}")
    if launcher == "ssh" and options.hostfile is None:
        raise LaunchError("--launcher ssh: which hosts? Name a file of them with --hostfile")
    if options.no_live and options.run_folder is None:
        raise LaunchError("--no-live is about the line that --run-folder shows. Add --run-folder DIR, or leave it out")
    if launcher == "local" and options.nnodes is not None:
        # One node is what a local run has, so the option is harmless. More nodes need a hostfile.
        if options.nnodes != "1":
            raise LaunchError(f"--nnodes {options.nnodes}: on which hosts? Name a file of them with --hostfile")
        options.nnodes = None
    interval_s = protocol.HEARTBEAT_INTERVAL_S
    checks = {
        "port": (0 <= options.port < 1 << 16, "ports go from 1 to 65535. Leave --port out for a free one"),
        "max_restarts": (options.max_restarts >= 0, "write 0 for none, or a positive number"),
        # These comparisons also refuse NaN, which is neither above 0 nor below it.
        "connect_timeout": (options.connect_timeout > 0, "write a number of seconds"),
        "import_timeout": (options.import_timeout > 0, "write a number of seconds"),
        "fan_out": (options.fan_out >= 1, "write 1 or more"),
        "max_idle_rounds": (options.max_idle_rounds >= 1, "write 1 or more"),
        # A shorter timeout would give up nodes that are only late with a heartbeat.
        "node_timeout": (options.node_timeout >= 5, f"nodes speak every {interval_s:g} s; write 5 or more"),
    }
    for name, (is_valid, remedy) in checks.items():
        if not is_valid:
            raise LaunchError(f"--{name.replace('_', '-')} {getattr(options, name):.10g}: {remedy}")
    # Options without effect are refused, since a user who gave one expects it to work.
    launch_parser = parser()
    for name, launchers in HONORED_BY.items():
        # An option that has its default value was not given, or asks for nothing special.
        if launcher not in launchers and getattr(options, name) != launch_parser.get_default(name):
            alternative = f": {ALTERNATIVES[launcher]}" if launcher in ALTERNATIVES else ""
            # DeepSpeed chooses GPUs of this machine by these options.
            if launcher == "local" and name in ("include", "exclude"):
                alternative = ". To choose GPUs of this machine, set CUDA_VISIBLE_DEVICES=0,1 before the command"
            raise LaunchError(
                f"--{name.replace('_', '-')} has no meaning with --launcher {launcher}, but with "
                f"{', '.join(launchers)}{alternative}. Leave one of them out"
            )
    options.launcher = launcher
