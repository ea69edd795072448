"""Trains under DDP and on the engine, and reports the losses, norms and rates that were logged, and how weights differ.

The arguments are stages.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from zeroengine.integrations.transformers import ZeroTrainer

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "no accumulation and no clipping": {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0},
}


def logged(trainer: Trainer) -> dict[str, list[float]]:
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in ("loss", "grad_norm", "learning_rate")}


def main() -> None:
    # An epoch of 28 samples has 7 micro-steps on each of two ranks, so its last step has one micro-step and not three.
    data = Tokens(28)
    found: dict[str, Any] = {}
    for case, changes in CASES.items():
        plain = Trainer(tiny_llama(), training_arguments(**changes), train_dataset=data)
        found[case] = {"ddp": logged(plain)}
        expected = plain.model.state_dict()
        for stage in map(int, sys.argv[1:]):
            config = {"zero_optimization": {"stage": stage}}
            trainer = ZeroTrainer(tiny_llama(), training_arguments(**changes), train_dataset=data, zero_config=config)
            found[case][f"stage {stage}"] = logged(trainer)
            weights = trainer.engine.full_state_dict()
            assert weights.keys() == expected.keys()
            differences = (torch.max(torch.abs(weights[name] - expected[name])) for name in weights)
            found[case][f"stage {stage}"]["weights"] = float(max(differences))
    report(found)


if __name__ == "__main__":
    main()
