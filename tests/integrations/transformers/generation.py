"""Generates with Seq2SeqTrainer under DDP and at stage 3, where one rank stops earlier, and reports the predictions."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from tests.integrations.environments import report
from zeroengine.integrations.transformers import ZeroTrainerMixin


class ZeroSeq2Seq(ZeroTrainerMixin, Seq2SeqTrainer):
    pass


class StopEarlyOnRank1(StoppingCriteria):
    """Ends every sequence after 3 tokens on rank 1."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), dist.get_rank() == 1 and input_ids.shape[1] > 3)


class Pairs(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(2 + index, 12 + index)
        return {"input_ids": tokens, "labels": tokens.flip(0)[:6]}


def tiny_t5() -> T5ForConditionalGeneration:
    set_seed(0)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, dropout_rate=0.0, **size))


def main() -> None:
    arguments = Seq2SeqTrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        predict_with_generate=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    found = {}
    for name in ("ddp", "stage 3"):
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        kind, keys = (Seq2SeqTrainer, {}) if name == "ddp" else (ZeroSeq2Seq, {"zero_config": config})
        trainer = kind(tiny_t5(), arguments, train_dataset=Pairs(), **keys)
        trainer.train()
        stops = StoppingCriteriaList([StopEarlyOnRank1()])
        predicted = trainer.predict(Pairs(), max_length=9, stopping_criteria=stops)
        found[name] = {"tokens": predicted.predictions.tolist(), "loss": predicted.metrics["test_loss"]}
    report(found)


if __name__ == "__main__":
    main()
