"""Run the command ``zero-plan``: which stage, offload and micro-batch a model should be trained with, and how fast.

Modules that need torch are imported after the request was checked, so that a wrong one is refused at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroengine.cli.parser import CommandParser, command, write_output
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import path_argument
from zeroengine.utils.formats import parse_byte_size

if TYPE_CHECKING:
    from zeroengine.plan.report.result import Plan
    from zeroengine.plan.seconds.machine import Machine
    from zeroengine.plan.trace.model_facts import ModelFacts

USAGE = "zero-plan [MODEL] [options]"
EXAMPLES = """\
examples:
  zero-plan train:build --config ds.json                    a function of train.py, on this machine
  zero-plan llama/config.json --seq 4096 --machine h100-80gb --nodes 2 --batch 512
  zero-plan --params 7e9 --layers 32 --width 4096 --vocab 32000 --seq 4096 --machine a100-40gb
  zero-plan train:build --machine a100-80gb --write best.json
  zero-plan --measure                                       how fast this machine is, in under two minutes
"""
# The preset whose rates stand for a machine of which only the memory is given.
DEFAULT_PRESET = "h100-80gb"
NUMBERS = ("params", "layers", "width", "vocab")
# The configuration key that each option sets.
KEYS = {
    "stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_param": "zero_optimization.offload_param.device",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


@command("zero-plan")
def main(argv: list[str] | None = None) -> int:
    """Plan, print the result, write the files that are asked for, and return the exit code: 3 if nothing fits."""
    options = _parser().parse_args(argv)
    if options.measure is not None:
        return _measure(options)
    sizes = {
        "device_bytes": _byte_size(options.memory, "--memory"),
        "host_bytes": _byte_size(options.host_memory, "--host-memory"),
        "disk_bytes": _byte_size(options.disk, "--disk"),
    }
    network = _network_bytes_per_second(options.network)
    _check_model(options)
    if options.html is not None:
        raise ZeroEngineError("--html: zero-plan writes no page. Write --all for a table of all candidates, or --json")
    if (path := options.write) is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ZeroEngineError(f"--write {path}: it cannot be written; write a file in a folder that exists")
    with _progress() as progress:
        progress("starting")
        plan = _plan(options, sizes, network, progress)
    chosen = options.choose
    if chosen > len(plan.estimates):
        raise ZeroEngineError(f"--choose {chosen}: write a number of the table, from 1 to {len(plan.estimates)}")
    if options.json:
        print(plan.to_json())
    else:
        print(plan.to_table(everything=options.all, color=sys.stdout.isatty()))
    if options.write:
        if not plan.estimates[chosen - 1].fits:
            reason = "; ".join(plan.estimates[chosen - 1].reasons)
            raise ZeroEngineError(
                f"--write {options.write}: candidate {chosen} does not fit ({reason}): nothing is written"
            )
        write_output(options.write, json.dumps(plan.configuration(chosen), indent=2) + "\n", "--write")
    return 0 if plan.best is not None else 3


def _parser() -> CommandParser:
    about = "Say what fits on a machine, at which stage and offload, with which micro-batch, and how long a step takes."
    parser = CommandParser("zero-plan", USAGE, about, EXAMPLES)
    model = "module:function, which returns a model or (model, make_batch); or a config.json of Hugging Face"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model)
    count: dict[str, Any] = {"metavar": "N", "type": _count}
    add = parser.add_argument_group("a model as plain numbers").add_argument
    add("--params", metavar="N", type=_number, help="parameters, such as 7e9")
    add("--layers", **count, help="blocks")
    add("--width", **count, help="of the residual stream")
    add("--vocab", **count, help="tokens of the vocabulary")
    add("--seq", **count, help="tokens of a sample; also for a config.json")
    add = parser.add_argument_group("the machine").add_argument
    add("--machine", metavar="NAME", help="a preset such as h100-80gb, this (the default), or a file of --measure")
    add("--nodes", **count, help="nodes")
    add("--ranks-per-node", **count, help="ranks of a node, such as its GPUs")
    add("--network", metavar="RATE", help="of one node, to the others, a second: 25Gbit, 3GB")
    add("--memory", metavar="SIZE", help="of one GPU: 80GB, 79.1GiB")
    add("--host-memory", metavar="SIZE", help="CPU memory of one node: 1TB")
    add("--disk", metavar="SIZE", help="free disk of one node for states on NVMe: 2TB")
    add = parser.add_argument_group("what is fixed; the rest is chosen").add_argument
    add("--config", metavar="FILE", type=path_argument, help="a configuration, whose keys are kept")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="set a key of the configuration")
    add("--batch", **count, help="samples of a step, over all ranks")
    add("--stage", metavar="N", type=int, choices=range(4), help="ZeRO stage")
    for name in ("--offload-optimizer", "--offload-param"):
        add(name, choices=("none", "cpu", "nvme"), metavar="PLACE", help="none, cpu or nvme")
    add("--micro-batch", **count, help="samples of a micro-step of a rank")
    add("--accumulation", **count, help="micro-steps of a step")
    add("--sequence-parallel", **count, nargs="+", default=[], help="numbers of ranks that share a sample, to compare")
    add("--tensor-parallel", **count, nargs="+", default=[], help="numbers of ranks that layers are split over")
    add("--expert-parallel", **count, nargs="+", default=[], help="numbers of ranks that experts are split over")
    add("--checkpointing", choices=("on", "off"), help="recompute activations in backward")
    add = parser.add_argument_group("the result").add_argument
    add("--all", action="store_true", help="show every candidate")
    add("--json", action="store_true", help="print JSON")
    add("--html", help=argparse.SUPPRESS)
    add("--write", metavar="FILE", type=path_argument, help="write the configuration of the best candidate")
    add("--choose", **count, default=1, help="the candidate that --write writes (default: 1)")
    add("--measure", metavar="FILE", nargs="?", const="", help="measure this machine, and keep the result")
    return parser


def _check_model(options: argparse.Namespace) -> None:
    """Check that the model is given in one way, before anything is imported."""
    given = [name for name in NUMBERS if getattr(options, name) is not None]
    if options.model is not None and given:
        raise ZeroEngineError(f"--{given[0]} describes another model than {options.model}: leave one of the two out")
    if options.model is None and (len(given) < len(NUMBERS) or options.seq is None):
        missing = [f"--{name} N" for name in (*NUMBERS, "seq") if getattr(options, name) is None]
        start = f"plain numbers also need {' '.join(missing)}" if given else "no model is given"
        raise ZeroEngineError(
            f"{start}. Write module:function, the path of a config.json, or --params 7e9 --layers 32 --width 4096 "
            "--vocab 32000 --seq 4096"
        )


def _plan(
    options: argparse.Namespace,
    sizes: dict[str, int | None],
    network: float | None,
    progress: Callable[[str], None],
) -> Plan:
    # The package's plan() is a function of the same name as the package, so it is imported from its module.
    from zeroengine.plan.api import plan

    overrides = list(options.set)
    for name, key in KEYS.items():
        if getattr(options, name) is not None:
            overrides.append(f"{key}={getattr(options, name)}")
    overrides += _nvme_paths(overrides)
    return plan(
        _model(options),
        options.config,
        _machine(options, sizes, network),
        batch=options.batch,
        checkpointing={"on": True, "off": False}.get(options.checkpointing or ""),
        sequence_parallel=options.sequence_parallel,
        tensor_parallel=options.tensor_parallel,
        expert_parallel=options.expert_parallel,
        overrides=overrides,
        progress=progress,
    )


def _model(options: argparse.Namespace) -> ModelFacts:
    from zeroengine.plan.api import model_facts
    from zeroengine.plan.trace.model_facts import from_numbers

    if options.model is not None:
        return model_facts(options.model, sequence=options.seq)
    return from_numbers(options.params, options.layers, options.width, options.vocab, options.seq)


def _machine(options: argparse.Namespace, sizes: dict[str, int | None], network: float | None) -> Machine:
    from zeroengine.plan.api import machine_with
    from zeroengine.plan.seconds.known_machines import load_machine

    given = {"nodes": options.nodes, "ranks_per_node": options.ranks_per_node, **sizes}
    if options.machine is None and options.memory is not None:
        name = f"GPUs as given, the rest of {DEFAULT_PRESET}"
        machine = dataclasses.replace(load_machine(DEFAULT_PRESET), name=name, ranks_per_node=1)
    else:
        machine = load_machine(options.machine or "this")
    if network is not None:
        rates = dataclasses.replace(machine.rates, node_link=network)
        machine = dataclasses.replace(machine, rates=rates, sources={**machine.sources, "node_link": "--network"})
    return machine_with(machine, **given)


def _nvme_paths(overrides: list[str]) -> list[str]:
    """Return overrides for the folders that states on NVMe need, where an option asks for such states."""
    from zeroengine.plan.search.candidates import NVME_PATH

    sections = [text.partition(".device=")[0] for text in overrides if text.endswith(".device=nvme")]
    return [f"{section}.nvme_path={NVME_PATH}" for section in sections]


def _measure(options: argparse.Namespace) -> int:
    from zeroengine.plan.measure import measure
    from zeroengine.plan.seconds.machine import default_machine_file, save_machine

    file = Path(options.measure) if options.measure else default_machine_file()
    with _progress() as progress:
        machine = measure(progress=progress, ranks=options.ranks_per_node)
    save_machine(machine, file)
    print(f"zero-plan: {file}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what is being done on one line of the terminal, and yield a function that takes it in words."""
    # A log file would fill up with the characters that move the cursor.
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("zero-plan") as status:
        yield lambda text: status.update(f"zero-plan: {text}")


def _byte_size(text: str | None, option: str) -> int | None:
    """Return a size in bytes, or None where it is not given. 0 stands for none, and other sizes have a unit."""
    if text is None or text.strip() == "0":
        return None if text is None else 0
    if text.strip().replace(".", "", 1).isdigit():
        raise ZeroEngineError(f"{option} {text}: a size has a unit; write {option} {text}GB or {option} {text}GiB")
    return parse_byte_size(text, option, ZeroEngineError)


def _network_bytes_per_second(text: str | None) -> float | None:
    """Return the value of --network, such as 25Gbit or 3GB, in bytes a second."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT])(bit|B)(?:/s)?", text.strip())
    rate = float(match[1]) * 1000 ** (1 + "KMGT".index(match[2])) if match else 0.0
    if match is None or not rate:
        raise ZeroEngineError(
            f"--network {text}: write bits or bytes a second, such as --network 25Gbit or --network 3GB"
        )
    return rate / 8 if match[3] == "bit" else rate


def _number(text: str) -> float:
    """Return a count such as 7e9, 7B or 350M."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        number = float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is no number; write one such as 7e9, 7B or 350M")
    return number


def _count(text: str) -> int:
    number = _number(text)
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(number)


if __name__ == "__main__":
    sys.exit(main())
