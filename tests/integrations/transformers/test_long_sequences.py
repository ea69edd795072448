from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent
# Part of the message for a model or a batch.
MESSAGES = {
    "mamba plain": "backbone.layers.0.mixer",
    "gpt_oss plain": "s_aux",
    "llama prefix": "past_key_values",
    "llama without shift_labels": "zeroengine.shard_sequence",
    "llama mask of four dimensions": "attention_mask has 4 dimensions",
    "t5 plain": "position_bias",
    "falcon plain": "takes a whole sequence and no part of it",
    "lfm2 plain": "model.layers.0.conv",
    "roberta plain": "roberta.embeddings",
    "bert plain": "zeroengine.mean_loss",
}


def check(found: dict[str, Any]) -> None:
    for case, runs in found["equal"].items():
        (losses, norms), *others = runs
        assert len(set(losses)) > 1 and others
        for other_losses, other_norms in others:
            assert other_losses == pytest.approx(losses, rel=0, abs=1e-6), case
            assert other_norms == pytest.approx(norms, rel=1e-6), case
    for case, message in found["refused"].items():
        assert message and MESSAGES.get(case, "sequence_parallel_size") in message, (case, message)


@pytest.mark.slow  # test_parallelism trains one of them
def test_families_train_with_parts_as_with_whole_samples_or_are_refused_by_name() -> None:
    for found in run_script("transformers", HERE / "long_sequences.py", ["some"], ranks=2):
        check(found)


@pytest.mark.slow
def test_more_families_train_with_parts_as_with_whole_samples_or_are_refused_by_name() -> None:
    for found in run_script("transformers", HERE / "long_sequences.py", ["all"], ranks=4):
        check(found)
