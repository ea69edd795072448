"""Trains under DDP and on the engine, and reports the losses, norms and rates that were logged, and how weights differ.

The arguments are "some" or "all", how many optimizers of few bits and models in tiles are checked, and stages.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from tests.integrations.transformers.tiled_models import MODELS, SOME_MODELS, check_models
from zeroengine import MixedOptimizer, Muon
from zeroengine.integrations.transformers import ZeroTrainer

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "no accumulation and no clipping": {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0},
    # Its rule looks at whole parameters.
    "Adafactor": {"optim": "adafactor", "num_train_epochs": 1},
    "Muon": {"num_train_epochs": 1},
}
AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
MUON = {"type": "Muon", "params": AUTO | {"ns_dtype": "fp32", "per_head_muon": True}}


def muon(model: torch.nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """What the section ``MUON`` stands for with these arguments."""
    names = dict(model.named_parameters())
    heads = {4: ["q_proj"], 2: ["k_proj", "v_proj"], 1: ["o_proj", "gate_proj", "up_proj", "down_proj"]}
    groups = [
        {"params": [p for name, p in names.items() if name.split(".")[-2] in modules], "num_matrices": count}
        for count, modules in heads.items()
    ]
    others = [p for name, p in names.items() if "norm" in name or "embed" in name or "lm_head" in name]
    shared = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    return MixedOptimizer(
        [Muon(groups, ns_dtype="fp32", **shared), torch.optim.AdamW(others, **shared, betas=(0.9, 0.999), eps=1e-8)]
    )


def logged(trainer: Trainer) -> dict[str, list[float]]:
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in ("loss", "grad_norm", "learning_rate")}


def check_optimizers_of_few_bits(everything: bool, stage: int) -> None:
    """Names of optimizers of bitsandbytes and torchao train with AdamW and Lion here, without these libraries.

    A section of the configuration has the bits of its type.
    """
    section = {"optimizer": {"type": "Lion8bit", "params": dict.fromkeys(("lr", "betas", "weight_decay"), "auto")}}
    some = (("adamw_8bit", {}, "AdamW", torch.uint8), ("adamw_torch", section, "Lion", torch.uint8))
    more = (("paged_adamw_32bit", {}, "AdamW", torch.float32), ("paged_lion_8bit", {}, "Lion", torch.uint8))
    for name, keys, kind, dtype in some + more * everything:
        arguments = training_arguments(optim=name, max_steps=1)
        config = {"zero_optimization": {"stage": stage}, **keys}
        trainer = ZeroTrainer(tiny_llama(), arguments, train_dataset=Tokens(28), zero_config=config)
        trainer.train()
        assert (trainer.engine.optimizer.base_optimizer_name, trainer.engine.config.state_dtype) == (kind, dtype), name
        trainer.engine.close()


def main() -> None:
    # An epoch of 28 samples has 7 micro-steps on each of two ranks, so its last step has one micro-step and not three.
    data = Tokens(28)
    everything, stages = sys.argv[1] == "all", list(map(int, sys.argv[2:]))
    found: dict[str, Any] = {}
    for case, changes in CASES.items():
        model, arguments = tiny_llama(), training_arguments(**changes)
        made: dict[str, Any] = {"optimizers": (muon(model, arguments), None)} if case == "Muon" else {}
        plain = Trainer(model, arguments, train_dataset=data, **made)
        found[case] = {"ddp": logged(plain)}
        expected = plain.model.state_dict()
        for stage in stages:
            config = {"zero_optimization": {"stage": stage}} | ({"optimizer": MUON} if case == "Muon" else {})
            trainer = ZeroTrainer(tiny_llama(), training_arguments(**changes), train_dataset=data, zero_config=config)
            found[case][f"stage {stage}"] = logged(trainer)
            weights = trainer.engine.full_state_dict()
            assert weights.keys() == expected.keys()
            differences = (torch.max(torch.abs(weights[name] - expected[name])) for name in weights)
            found[case][f"stage {stage}"]["weights"] = float(max(differences))
    check_optimizers_of_few_bits(everything, stages[0])
    check_models(list(MODELS if everything else SOME_MODELS), stages)
    report(found)


if __name__ == "__main__":
    main()
