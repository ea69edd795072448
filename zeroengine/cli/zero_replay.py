"""Run the command `zero-replay`: take a step of a run again, and say whether it gives the digests that the run had."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroengine.cli.parser import CommandParser, command
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.utils.listed import listed
from zeroengine.utils.paths import path_argument
from zeroengine.view.digest_comparison import DigestComparison
from zeroengine.view.digest_table import read_digests
from zeroengine.view.run_reader import RunReader

USAGE = "zero-replay RUN --step N [options]"
EXAMPLES = """\
examples:
  zero-replay runs/a --step 1500                                   is this what the run should have computed?
  zero-replay runs/a --step 1500 --stage 3                         at another stage, which gives the same digests
  zero-replay runs/a --step 1500 --set comm.transport=gloo         with one value of the configuration replaced
The script runs again, from the last checkpoint before the step. Its own saves do nothing.
The exit code is 0 where the digests are those of the run, 1 where they differ, and 2 for trouble.
"""
# A replay writes into a folder of its own, and nothing of what it writes is to last.
OVERRIDES = ("monitor.enabled=true", "replay.keep=null", "snapshots.every_seconds=null", "checkpoint.on_signal=null")
NUM_SHOWN = 3


@dataclass(frozen=True)
class Start:
    """Where a replay begins: after a step, with the checkpoint of it; None: with the script."""

    step: int
    checkpoint: Path | None


@command("zero-replay")
def main(argv: list[str] | None = None) -> int:
    """Replay and return the exit code."""
    about = "Take a step of a run again, on as many ranks, and say whether it gives the digests that the run recorded."
    parser = CommandParser("zero-replay", USAGE, about, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", type=path_argument, help="the run folder, with digests")
    add("--step", metavar="N", type=int, required=True, help="the step, which has digests")
    add("--stage", metavar="S", type=int, choices=range(4), help="a stage other than the run's")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="replace a value of the configuration")
    add("--checkpoint", metavar="DIR", type=path_argument, help="the checkpoint to begin with, as in saved/step-1400")
    add("--hostfile", metavar="FILE", type=path_argument, help="run the ranks on these hosts, as zero-launch does")
    add("--once", action="store_true", help="do not replay a second time where the first replay differs")
    options = parser.parse_args(argv)
    reader = RunReader(options.run)
    reader.read()
    recorded, run = read_digests(options.run), reader.facts
    if options.step not in recorded.steps:
        near = sorted(recorded.steps.tolist(), key=lambda step: abs(step - options.step))[:NUM_SHOWN]
        raise ZeroEngineError(
            f"{options.run} has no digests of step {options.step:,}: the nearest steps with digests are "
            f"{listed(list(map(str, sorted(near))), NUM_SHOWN)}"
        )
    start = _find_start(reader, options.step, options.checkpoint)
    overrides = [*options.set, *([] if options.stage is None else [f"zero_optimization.stage={options.stage}"])]
    names = [f"the run {options.run}", "the replay", "the second replay"]
    tables = [recorded]
    with tempfile.TemporaryDirectory(prefix="zero-replay-") as temporary:
        for name in names[1 : 2 if options.once else 3]:
            folder = Path(temporary, name.replace(" ", "-"))
            _run(run, options, start, overrides, folder)
            tables.append(read_digests(folder))
            comparison = DigestComparison((recorded, tables[-1]), (names[0], name))
            if comparison.steps[-1] != options.step:
                raise ZeroEngineError(
                    f"the script ended after step {comparison.steps[-1]:,}, before step {options.step:,}"
                )
            if comparison.first() is None:
                break
    return _report(tables, names, run)


def _find_start(reader: RunReader, step: int, checkpoint: Path | None) -> Start:
    """Return the last checkpoint before a step.

    Raises:
        ZeroEngineError: The one that was asked for is not before the step.
    """
    from zeroengine.checkpoint.inspect import find_checkpoint

    # The script may have named its folder of checkpoints from where it was started.
    base = str(reader.facts.get("command", {}).get("folder", "."))
    events = [event for event in reader.events if event["kind"] in ("checkpoint", "resume")]
    paths = [Path(base, str(event.get("path"))) for event in events]
    # A run that goes on from a checkpoint records the folder of checkpoints alone.
    paths += [Path(path, f"step-{event['step']}") for path, event in zip(paths, events, strict=True)]
    paths = paths if checkpoint is None else [checkpoint]
    starts = [Start(0, None)]
    for path in paths:
        try:
            found, manifest = find_checkpoint(path, None)
        except CheckpointError:
            # The run has removed it since, or moved on to another folder.
            if checkpoint is not None:
                raise
            continue
        if manifest is not None and manifest.step < step:
            starts.append(Start(manifest.step, found))
    if checkpoint is not None and len(starts) == 1:
        raise ZeroEngineError(f"{checkpoint} is not a checkpoint of a step before {step:,}: name an earlier one")
    return max(starts, key=lambda start: start.step)


def _run(run: dict[str, Any], options: Any, start: Start, overrides: Sequence[str], folder: Path) -> None:
    """Run the script from its start to the step, with digests in `folder`.

    Raises:
        ZeroEngineError: run.json does not say how the run was started, or the script failed.
    """
    from zeroengine.engine.replay import REPLAY_VARIABLE, ReplayTarget

    how, world_size = run.get("command"), int(run["world_size"])
    if not how:
        raise ZeroEngineError(f"{options.run}/run.json does not say how the run was started: an older version wrote it")
    print(
        f"zero-replay: steps {start.step + 1:,} to {options.step:,} on {world_size} ranks, from "
        f"{start.checkpoint or 'the start of the script'}",
        flush=True,
    )
    checkpoint = None if start.checkpoint is None else start.checkpoint.absolute()
    directory, tag = (None, None) if checkpoint is None else (str(checkpoint.parent), checkpoint.name)
    target = ReplayTarget(options.step, str(options.run.absolute()), directory, tag)
    values = [*how["overrides"], *overrides, *OVERRIDES, f"monitor.folder={folder}"]
    words = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--no-live", "--run-folder", str(folder)]
    if options.hostfile is None:
        words += ["--nproc", str(world_size)]
    else:
        words += ["--hostfile", str(options.hostfile.absolute()), "--nproc", str(world_size // len(set(run["hosts"])))]
    words += ["--cpu"] * (run["device"] == "cpu") + (["--config", how["config"]] if how["config"] else [])
    words += [word for value in values for word in ("--set", value)] + list(how["words"])
    environment = os.environ | {REPLAY_VARIABLE: target.to_variable()}
    # What the script prints is not the answer, which may be read by a program.
    code = subprocess.run(words, cwd=how["folder"], env=environment, stdout=sys.stderr).returncode
    if code:
        raise ZeroEngineError(f"the script failed with exit code {code} before step {options.step:,}: see above")


def _report(tables: Sequence[Any], names: Sequence[str], run: dict[str, Any]) -> int:
    """Print what the replays gave, and return the exit code."""
    recorded, *replays = tables
    last = DigestComparison((recorded, replays[-1]), ("", ""))
    if last.first() is None and len(replays) == 1:
        steps = listed([f"{step:,}" for step in last.steps], NUM_SHOWN)
        print(f"Equal: the replay gave the digests that the run recorded, at step {steps}.")
        return 0
    print(_describe(DigestComparison((recorded, replays[0]), names[:2]), names[:2]))
    if len(replays) == 2:
        pair = DigestComparison(replays, names[1:])
        if pair.first() is not None:
            print(_describe(pair, names[1:]))
            print("Two replays differ, so something that the model computes with is not deterministic.")
        else:
            hosts = ", ".join(dict.fromkeys(run["hosts"]))
            print(
                f"Two replays agree, so the run computed something else: memory, a processor or a link of {hosts} was "
                "wrong, or the script, its data, its settings or its libraries have changed since (zero-diff compares "
                "the settings of two runs)."
            )
    return 1


def _describe(comparison: DigestComparison, names: Sequence[str]) -> str:
    first = comparison.first()
    if first is None:
        return f"{names[0]} and {names[1]} have equal digests."
    states = " and ".join(f"{kind} of {listed(units, NUM_SHOWN)}" for kind, units in first.units.items())
    return " ".join(
        [
            f"Different: {names[0]} and {names[1]} differ first at step {first.step:,}, in {states}.",
            *comparison.given(first.step),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
