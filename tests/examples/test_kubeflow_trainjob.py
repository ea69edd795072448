"""The manifest for Kubeflow Trainer: by the published schema, and its command with the variables of the operator."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integrations.environments import ROOT, python_of, run_program
from zeroengine.launch.schedulers.kubernetes import build_manifest

MANIFEST = ROOT / "examples" / "kubeflow_trainjob.yaml"
TINY = "--layers 1 --width 16 --heads 2 --context 16 --eval-batches 1 --sample-bytes 2".split()


def unknown_keys(manifest: Path) -> list[str]:
    done = run_program([str(python_of("kubeflow")), str(ROOT / "tests/examples/check_trainjob.py"), str(manifest)])
    assert done.returncode == 0, done.stdout
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow  # test_schedulers has the manifests without the published schema
def test_manifests_have_the_published_fields_of_a_trainjob(tmp_path: Path) -> None:
    assert unknown_keys(MANIFEST) == []
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(MANIFEST.read_text().replace("numProcPerNode", "numProcsPerNode"))
    assert unknown_keys(misspelt) == [".spec.trainer.numProcsPerNode"]
    of_launcher = tmp_path / "launcher.yaml"
    text, _ = build_manifest(
        "TrainJob", "train", "i:1", "2", "8", ["/app/train.py", "--x", "1"], {"A": "1", "TOKEN": "s"}
    )
    of_launcher.write_text(text)
    assert unknown_keys(of_launcher) == []


def run_pods(folder: Path, steps: int) -> str:
    """Run the command of each pod on this machine, as Trainer's plugin for torch starts it, and return the output."""
    job: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    trainer = job["spec"]["trainer"]
    places = {"/app/train_lm.py": "examples/train_lm.py", "/app/zero3.json": "configs/zero3.json"}
    words = [places.get(word, word.replace("/runs", str(folder))) for word in (*trainer["command"], *trainer["args"])]
    assert words[0] == "python"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pods = []
    for pod in range(trainer["numNodes"]):
        # Two pods have one process each here, as there are no sixteen GPUs.
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(pod),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        pods.append(
            subprocess.Popen(
                [sys.executable, *words[1:], *TINY, "--steps", str(steps)],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [pod.communicate(timeout=240)[0] for pod in pods]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    return outputs[0]


@pytest.mark.slow
def test_the_command_trains_in_two_pods_and_goes_on_when_applied_again(tmp_path: Path) -> None:
    output = run_pods(tmp_path, steps=4)
    assert "at stage 3 on 2 ranks (cpu)" in output
    assert re.search(r"step 4/4  loss [\d.]+", output)
    again = run_pods(tmp_path, steps=6)
    assert "continues after step 4" in again and "step 6/6" in again
