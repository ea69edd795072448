"""Run an example in the environment of its framework."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.environments import ROOT, python_of, run_program


def run_example(script: str, *arguments: object) -> str:
    """Run ``examples/script`` on two ranks, and return what it printed."""
    command = [str(python_of("transformers")), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_program([*command, str(Path(ROOT, "examples", script)), *map(str, arguments)])
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
