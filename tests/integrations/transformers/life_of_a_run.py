"""Evaluates, saves, resumes and loads the best model at stages of the engine, and reports what came of it.

The argument is a folder for checkpoints, which all ranks share.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer

import zeroengine
from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from zeroengine.integrations.transformers import ZeroTrainer

FOLDER = Path(sys.argv[1])
TRAIN, EVAL = Tokens(28), Tokens(10, seed=1)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **keys}


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def evaluation() -> dict[str, Any]:
    """Evaluate before, during and after training, as DDP does, and predict."""
    arguments = training_arguments(eval_strategy="epoch")
    found = {}
    for name in ("ddp", "stage 3"):
        kind, keys = (Trainer, {}) if name == "ddp" else (ZeroTrainer, {"zero_config": zero(3)})
        trainer = kind(tiny_llama(), arguments, train_dataset=TRAIN, eval_dataset=EVAL, **keys)
        before = trainer.evaluate()["eval_loss"]
        if name == "ddp":
            # accelerate 1.15 does not wrap a model in DDP that it has prepared for an evaluation.
            trainer = kind(tiny_llama(), arguments, train_dataset=TRAIN, eval_dataset=EVAL)
        trainer.train()
        history = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        predicted = trainer.predict(EVAL)
        found[name] = [before, *history[-2:], predicted.metrics["test_loss"], float(predicted.predictions.mean())]
    return found


def resumption() -> dict[str, Any]:
    """Save halfway and at the end, and resume at the same and at another stage. The model has dropout."""
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "output_dir": str(FOLDER / "run")}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}}
    auto = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"}
    schedule = {"type": "WarmupDecayLR", "params": auto}
    found = {}
    for name, keys in {"own": {}, "configured": {"optimizer": optimizer, "scheduler": schedule}}.items():
        runs = {}
        for stage, start in ((3, None), (3, 3), (1, 3)):
            model = tiny_llama(attention_dropout=0.2)
            changes["output_dir"] = str(FOLDER / f"run-{name}" / ("first" if start is None else f"stage{stage}"))
            trainer = ZeroTrainer(
                model, training_arguments(**changes), train_dataset=TRAIN, zero_config=zero(stage, **keys)
            )
            resumed = start and str(FOLDER / f"run-{name}" / "first" / f"checkpoint-{start}")
            trainer.train(resume_from_checkpoint=resumed)
            rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
            assert trainer.engine is not None
            total = sum(float(value.double().sum()) for value in trainer.engine.full_state_dict().values())
            runs[f"{stage} from {start}"] = {"losses": losses(trainer), "rates": rates, "total": total}
        found[name] = runs
    return found


def again_in_the_same_folder() -> int:
    """Train further in the folder of an earlier run whose engine still exists, with resume_from_checkpoint=True."""
    arguments = training_arguments(save_strategy="epoch", output_dir=str(FOLDER / "again"))
    first = ZeroTrainer(tiny_llama(), arguments, train_dataset=TRAIN, zero_config=zero(2))
    first.train()
    arguments = training_arguments(save_strategy="epoch", output_dir=str(FOLDER / "again"), num_train_epochs=3)
    second = ZeroTrainer(tiny_llama(), arguments, train_dataset=TRAIN, zero_config=zero(3))
    second.train(resume_from_checkpoint=True)
    second.train()  # once more, from the beginning of the data
    assert first.engine is not second.engine
    before = second.engine.full_state_dict()
    third = ZeroTrainer(second.model, training_arguments(), train_dataset=TRAIN, zero_config=zero(1))
    third.train()
    after = third.engine.full_state_dict()
    assert third.engine.config.zero_optimization.stage == 1
    assert not any(torch.equal(before[name], after[name]) for name in before), "another trainer trains the same model"
    return len(losses(second))


def weights() -> dict[str, float]:
    """Save complete weights at stage 3 of a model that was built without memory, and load the best checkpoint."""
    with zeroengine.meta_init():
        model = tiny_llama()
    arguments = training_arguments(
        save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True, output_dir=str(FOLDER / "best")
    )
    arguments.num_train_epochs = 3
    arguments.learning_rate = 3e-2  # so large that the first epoch is not the worst
    trainer = ZeroTrainer(model, arguments, train_dataset=TRAIN, eval_dataset=EVAL, zero_config=zero(3))
    trainer.train()
    trainer.save_model(str(FOLDER / "final"))
    torch.distributed.barrier()
    loaded = LlamaForCausalLM.from_pretrained(FOLDER / "final").state_dict()
    best = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
    evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {
        "from best": max(float((loaded[name] - value).abs().max()) for name, value in best.items()),
        "best": min(evals),
        "last": evals[-1],
        "loaded": trainer.evaluate()["eval_loss"],
        "number": len(loaded),
    }


def main() -> None:
    report(
        {
            "evaluation": evaluation(),
            "resumption": resumption(),
            "again": again_in_the_same_folder(),
            "weights": weights(),
        }
    )


if __name__ == "__main__":
    main()
