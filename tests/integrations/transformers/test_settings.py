from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.environments import run_script

HERE = Path(__file__).parent
# What each message names, and what it says to write.
EXPECTED = {
    "precision": ["bf16.enabled: found true", "TrainingArguments has false"],
    "autocast": ["torch_autocast", "TrainingArguments(bf16=True)"],
    "rate": ["optimizer.params.lr: found 0.0001", "TrainingArguments has 0.005"],
    "micro-batch": ["train_micro_batch_size_per_gpu: found 16", "TrainingArguments has 2"],
    "clipping": ["gradient_clipping: found 7.0", "TrainingArguments has 0.5"],
    "fsdp": ["fsdp=True", "leave fsdp out"],
    "casting evaluation": ["bf16_full_eval=True", "Leave it out"],
    "two optimizers": ["given a AdamW", 'the configuration names "optimizer"'],
    "optimizer of another model": ["the optimizer has parameters of none of the prepared models"],
    "schedule of another optimizer": ["ConstantLR", "optimizers=(optimizer, scheduler)"],
    "two schedules": ["given a ConstantLR", 'the configuration names "scheduler"'],
    "no checkpoint": ["there is no folder /nowhere/checkpoint-7", "True for the newest one"],
    "old version": ["found transformers 4.57.1", "pip install 'transformers>=5.23'"],
}


@pytest.mark.slow  # test_features of accelerate has contradictions of the same kinds
def test_contradictions_are_errors_that_say_what_to_write() -> None:
    (messages,) = run_script("transformers", HERE / "refusals.py", ranks=1)
    assert messages.keys() == EXPECTED.keys()
    for name, texts in EXPECTED.items():
        assert all(text in messages[name] for text in texts), (name, messages[name])
