"""Run the command `zero-replay`: take a step of a run again, and say whether it gives the digests that the run had."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zeroengine.cli.parser import CommandParser, command
from zeroengine.cli.zero_diff import show
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.utils.files import path_argument
from zeroengine.utils.formats import counted
from zeroengine.view.diff_report import compare_runs, read_side
from zeroengine.view.digest_comparison import DigestComparison, span_of
from zeroengine.view.digest_table import read_digests
from zeroengine.view.run_reader import RunReader

USAGE = "zero-replay RUN --step N [options]"
EXAMPLES = """\
examples:
  zero-replay runs/a --step 1500                                   is this what the run should have computed?
  zero-replay runs/a --step 1500 --set zero_optimization.stage=3   at another stage, which gives the same digests
The script runs again, from the last checkpoint before the step. Its own saves do nothing.
The exit code is 0 where the digests are those of the run, 1 where they differ, and 2 for trouble.
"""
# A replay writes into a folder of its own, and nothing of what it writes is to last.
OVERRIDES = ("monitor.enabled=true", "replay.keep=null", "snapshots.every_seconds=null", "checkpoint.on_signal=null")


@command("zero-replay")
def main(argv: list[str] | None = None) -> int:
    """Replay and return the exit code."""
    about = "Take a step of a run again, on as many ranks, and say whether it gives the digests that the run recorded."
    parser = CommandParser("zero-replay", USAGE, about, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", type=path_argument, help="the run folder, with digests")
    add("--step", metavar="N", type=int, required=True, help="the step, which has digests")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="replace a value of the configuration")
    add("--hostfile", metavar="FILE", type=path_argument, help="run the ranks on these hosts, as zero-launch does")
    add("--once", action="store_true", help="do not replay a second time where the first replay differs")
    options = parser.parse_args(argv)
    reader, recorded = RunReader(options.run), read_digests(options.run)
    if options.step not in recorded.steps:
        raise ZeroEngineError(
            f"{options.run} has no digests of step {options.step:,}: it has {span_of(recorded.steps)}"
        )
    facts, num_ranks = reader.facts, int(recorded.world_sizes[recorded.steps.tolist().index(options.step)])
    # A run that was started again may have had other ranks at the step. With replicas that train apart, digests are
    # those of one of them, and the number of its ranks.
    if num_ranks and facts.get("config", {}).get("local_steps") is None:
        facts |= {"world_size": num_ranks}
    start, names, replays = _find_start(reader, options.step), [str(options.run), "the replay"], []
    with tempfile.TemporaryDirectory(prefix="zero-replay-") as temporary:
        for number in range(1 if options.once else 2):
            folder = Path(temporary, str(number))
            _run(facts, options, start, folder)
            replays.append(read_digests(folder))
            comparison = DigestComparison((recorded, replays[-1]), names)
            if (last := comparison.steps[-1]) != options.step:
                raise ZeroEngineError(f"the script ended after step {last:,}, before step {options.step:,}")
            if number == 0:
                sides = [read_side(path, name) for path, name in zip((options.run, folder), names, strict=True)]
                show(compare_runs(comparison, sides))
            is_equal = (difference := comparison.first()) is None
            if difference is None:
                break
            if any(comparison.given(difference.step)):
                print(
                    "The replay was given other data than the run, which may be all there is to it: the script goes on "
                    "with other data from a checkpoint than without one (engine.dataloader() does not), or they have "
                    'changed. "replay": {"keep": N} in the configuration keeps the inputs of the last N steps.'
                )
                return 1
    if len(replays) == 2 and DigestComparison(replays, names).first() is not None:
        print("Two replays differ, so something that the model computes with is not deterministic.")
    elif len(replays) == 2:
        print(
            "Two replays agree, so the run computed something else: memory, a processor or a link of "
            f"{', '.join(dict.fromkeys(reader.facts['hosts']))} was wrong, or the script, its data, its settings or "
            "its libraries have changed since."
        )
    return int(len(replays) == 2 or not is_equal)


def _find_start(reader: RunReader, step: int) -> tuple[int, Path | None]:
    """Return the step of the last checkpoint before a step, and the checkpoint; 0 and None: the start of the script."""
    from zeroengine.checkpoint.inspect import find_checkpoint

    # The script may have named its folder of checkpoints from where it was started.
    base = str(reader.facts.get("command", {}).get("folder", "."))
    starts: list[tuple[int, Path | None]] = [(0, None)]
    for event in reader.events:
        if event["kind"] not in ("checkpoint", "resume"):
            continue
        path = Path(base, str(event.get("path")))
        # A run that goes on from a checkpoint records the folder of checkpoints alone.
        for place in (path, path / f"step-{event.get('updates', event.get('step'))}"):
            # The run may have removed it since, or moved on to another folder.
            with contextlib.suppress(CheckpointError):
                checkpoint, manifest = find_checkpoint(place, None)
                if manifest is not None and manifest.num_steps < step:
                    starts.append((manifest.num_steps, checkpoint))
    return max(starts, key=lambda start: start[0])


def _run(run: dict[str, Any], options: Any, start: tuple[int, Path | None], folder: Path) -> None:
    """Run the script from its start to the step, with digests in `folder`.

    Raises:
        ZeroEngineError: run.json does not say how the run was started, or the script failed.
    """
    from zeroengine.engine.replay import REPLAY_VARIABLE, ReplayTarget

    how, world_size, (first, checkpoint) = run.get("command"), int(run["world_size"]), start
    if not how:
        raise ZeroEngineError(f"{options.run}/run.json does not say how the run was started: an older version wrote it")
    origin = None if checkpoint is None else str(checkpoint)
    name = Path(origin or "").name
    differs = name.startswith("step-") and name != f"step-{first}"
    note = f", which is of step {first:,}: its tag leaves skipped steps out" if differs else ""
    print(
        f"zero-replay: steps {first + 1:,} to {options.step:,} on {counted(world_size, 'rank')}, from "
        f"{origin or 'the start of the script'}{note}",
        flush=True,
    )
    target = ReplayTarget(options.step, str(options.run.absolute()), origin)
    ranks = world_size if options.hostfile is None else world_size // len(set(run["hosts"]))
    words = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--no-live", "--run-folder", str(folder)]
    words += ["--nproc", str(ranks)] + (["--hostfile", str(options.hostfile.absolute())] if options.hostfile else [])
    words += ["--cpu"] * (run["device"] == "cpu") + (["--config", how["config"]] if how["config"] else [])
    for value in [*how["overrides"], *options.set, *OVERRIDES, f"monitor.folder={folder}"]:
        words += ["--set", value]
    environment = os.environ | {REPLAY_VARIABLE: json.dumps(vars(target))}
    # What the script prints is not the answer, which may be read by a program.
    words += how["words"]
    code = subprocess.run(words, cwd=how["folder"], env=environment, stdout=sys.stderr).returncode
    if code:
        raise ZeroEngineError(f"the script failed with exit code {code} before step {options.step:,}: see above")


if __name__ == "__main__":
    sys.exit(main())
