"""Training on a GPU that the CPU plays: what of it runs each time.

``ZEROENGINE_TEST_DEVICE=emulated bin/test`` runs the whole suite so, ``ZEROENGINE_TEST_DEVICE=cuda`` on a real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.emulated import wanted

ROOT = Path(__file__).parents[1]
SHORT = (
    "tests/emulated",
    "tests/test_gpu.py::test_forward_backward_and_step_wait_for_nothing[bf16]",
    "tests/test_gpu.py::test_tensors_in_cpu_memory_are_copied_to_the_gpu_that_computes",
    "tests/test_gpu.py::test_a_forward_does_not_wait_for_inputs_in_pinned_memory",
    "tests/test_gpu.py::test_inputs_are_compared_over_ranks_without_waiting",
    "tests/test_gpu.py::test_ranks_that_share_samples_are_compared_without_waiting",
    "tests/test_gpu.py::test_an_overflow_changes_nothing",
    "tests/test_gpu.py::test_a_step_inside_a_graph_is_refused_and_can_be_taken_outside",
    "tests/test_gpu.py::test_states_away_give_the_losses_of_states_on_the_gpu[both on disk-bf16]",
    "tests/ops/test_cuda_device.py::test_a_step_does_not_make_the_host_wait",
    "tests/ops/test_cuda_device.py::test_a_graph_replays_the_step_with_the_present_values",
    "tests/checkpoint/test_engine_checkpoints.py::test_training_goes_on_bit_for_bit[bf16]",
)
# Those above train on several ranks without waiting, keep states on disk and gather whole states, too.
OTHERS = (
    "tests/sequence/test_host_activations.py::test_peak_on_the_device_is_lower_by_the_inputs_and_nothing_waits",
    "tests/test_gpu.py::test_states_away_give_the_losses_of_states_on_the_gpu[both-bf16]",
    "tests/distributed/test_accumulation.py::test_plain_loss_backward_is_engine_backward",
    "tests/distributed/test_offload.py::test_nvme_gives_the_bits_of_memory[2 ranks, stage 3, both-bf16]",
    "tests/distributed/test_states_away.py::test_training_goes_on_with_the_same_bits_after_states_were_away",
    "tests/distributed/test_gathered.py::test_gathered_gives_the_values_of_modules_parameters_and_lists",
)


@pytest.mark.skipif(wanted() != "cpu", reason="every test runs on a GPU")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the GPU cannot be compiled")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has the place of the played GPU taken")
@pytest.mark.parametrize("tests", [SHORT, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_engines_train_on_a_gpu_that_the_cpu_plays(tests: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    settings = os.environ | {"ZEROENGINE_TEST_DEVICE": "emulated"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]
