"""Fine-tune on questions and answers as command-line arguments say, in the way of LLaMA-Factory.

``HfArgumentParser`` reads three groups of arguments, ``--deepspeed`` among them. Seq2SeqTrainer trains, saves, resumes,
and predicts by generating.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from tests.integrations.environments import report


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="", metadata={"help": "The folder of the weights."})


@dataclass
class DataArguments:
    cutoff_len: int = field(default=16, metadata={"help": "The longest sample, in tokens."})
    max_samples: int = field(default=32, metadata={"help": "How many questions there are."})


class Questions(Dataset[dict[str, list[int]]]):
    """Sums such as "3+4=" and their answers. Only the answer is learned, and only the question is given to predict."""

    def __init__(self, tokenizer: Any, data: DataArguments, whole: bool) -> None:
        self.samples = []
        for number in range(data.max_samples):
            left, right = number % 10, number // 3
            question, answer = tokenizer.encode(f"{left}+{right}="), tokenizer.encode(f"{left + right}")
            answer.append(tokenizer.eos_token_id)
            tokens = (question + answer)[: data.cutoff_len] if whole else question
            labels = [-100] * len(question) + answer if whole else answer
            self.samples.append(
                {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels[: data.cutoff_len]}
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.samples[index]


parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))  # type: ignore[arg-type]
model_arguments, data_arguments, arguments = parser.parse_args_into_dataclasses()
tokenizer = PreTrainedTokenizerFast.from_pretrained(model_arguments.model_name_or_path, padding_side="left")


def trainer(name: str) -> Seq2SeqTrainer:
    # Each run has arguments of its own, as accelerate asks where a program trains twice.
    model_arguments, data_arguments, arguments = parser.parse_args_into_dataclasses()
    arguments.output_dir = f"{ROOT}/{name}"
    return Seq2SeqTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_arguments.model_name_or_path),
        args=arguments,
        train_dataset=Questions(tokenizer, data_arguments, whole=True),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, label_pad_token_id=-100),
        processing_class=tokenizer,
    )


def losses(state: Any) -> list[float]:
    return [entry["loss"] for entry in state.log_history if "loss" in entry]


ROOT = arguments.output_dir
whole = trainer("whole")
whole.train()
whole.save_model()
whole.save_state()
# An even number of samples for each rank would hide that ranks end at different lengths.
questions = Questions(tokenizer, DataArguments(max_samples=7), whole=False)
predicted = whole.predict(questions, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id)
tokens = np.where(predicted.predictions >= 0, predicted.predictions, tokenizer.pad_token_id)
resumed = trainer("resumed")
resumed.train(resume_from_checkpoint=f"{ROOT}/whole/checkpoint-{int(arguments.save_steps)}")
torch.distributed.barrier()
weights = load_file(f"{ROOT}/whole/model.safetensors")
report(
    {
        "losses": losses(whole.state),
        "resumed": losses(resumed.state),
        "predicted": tokenizer.batch_decode(tokens, skip_special_tokens=True),
        "saved": sum(value.double().abs().sum().item() for value in weights.values()),
        "engine": type(whole.model_wrapped).__module__,
    }
)
