"""Measures the peak bytes of a rank for long sequences, and what each part of the engine for them changes.

The model is a Llama of transformers with two layers of the size that the other benchmarks call m, in fp32. Each row
trains in fresh processes, one for each rank. "Peak" is the most bytes of tensors that a micro-step makes and that are
alive at one time, beside the engine's states, with the memory that parts of sequences are sent from; "planned" is what
``zeroengine.plan`` predicts for it.

The second table is an extrapolation: nothing of it has run. It is the plan of a Llama of 8 B parameters in bf16 on
eight GPUs of 80 GB at stage 3.

    python benchmarks/sequence_memory.py --tokens 8192 16384 32768
    python benchmarks/sequence_memory.py --tokens 8192 --only "2 ranks a sample"
    python benchmarks/sequence_memory.py --no-measure        the extrapolation alone
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from zeroengine.config import load
from zeroengine.plan.trace.activations import trace_micro_step
from zeroengine.plan.trace.model_facts import ModelFacts, from_huggingface
from zeroengine.plan.trace.operation_trace import OperationTrace
from zeroengine.utils.tensors import tensors_in


class Part(NamedTuple):
    """A row of the tables: what is switched on.

    Attributes:
        name: Its name.
        ranks: The number of ranks that are measured.
        checkpointing: Whether blocks are checkpointed.
        config: Keys of the configuration.
    """

    name: str
    ranks: int
    checkpointing: bool
    config: dict[str, Any]


TILES: dict[str, Any] = {"tiling": {"loss": True, "mlp": True}}
ON_HOST: dict[str, Any] = {"activation_checkpointing": {"cpu_checkpointing": True}}
# A further part is a further line.
PARTS = (
    Part("before", 1, False, {}),
    Part("checkpointing", 1, True, {}),
    Part("checkpointing, tiled loss", 1, True, {"tiling": {"loss": True}}),
    Part("checkpointing, tiles", 1, True, TILES),
    Part("2 ranks a sample", 2, False, {"sequence_parallel_size": 2}),
    Part("2 ranks a sample, checkpointing", 2, True, {"sequence_parallel_size": 2}),
    Part("4 ranks a sample", 4, False, {"sequence_parallel_size": 4}),
    Part("2 ranks, checkpointing, tiles", 2, True, {"sequence_parallel_size": 2, **TILES}),
)
# The parts of the extrapolation.
LARGE_PARTS = (
    Part("checkpointing", 8, True, {}),
    Part("8 ranks a sample", 8, False, {"sequence_parallel_size": 8}),
    Part("8 ranks a sample, checkpointing", 8, True, {"sequence_parallel_size": 8}),
    Part("checkpointing, tiles", 8, True, TILES),
    Part("checkpointing, tiles, host", 8, True, TILES | ON_HOST),
    Part("8 ranks, checkpointing, tiles", 8, True, {"sequence_parallel_size": 8, **TILES}),
    Part("8 ranks, checkpointing, tiles, host", 8, True, {"sequence_parallel_size": 8, **TILES, **ON_HOST}),
)
LARGE_TOKENS = (131072, 262144, 524288, 1048576)
WARM_UP_TOKENS = 256
SIZE_M = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 2048}
MODEL = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 32768, **SIZE_M}
WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
LARGE_MODEL = {"model_type": "llama", "num_hidden_layers": 32, "vocab_size": 128256, **WIDE}


class NewBytes(OperationTrace):
    """Counts the bytes of what a micro-step makes, and not those of what there is before.

    Memory that no operation of torch makes, as that of a transport, counts from its first use on.
    """

    def __enter__(self) -> NewBytes:
        self.ignore(value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter))
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in((args, kwargs, result)):
            self._track(tensor)
        return result


def facts_of(content: dict[str, Any], tokens: int) -> ModelFacts:
    """Return what the planner knows of the model of a configuration of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**content, "max_position_embeddings": LARGE_TOKENS[-1]}))
        return from_huggingface(folder, tokens)


def measure_rank(part: Part, tokens: int, vocab: int) -> int:
    """Return the peak of this rank in a micro-step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(max((os.cpu_count() or 1) // part.ranks, 1))
    settings = AutoConfig.for_model(**MODEL | {"vocab_size": vocab, "max_position_embeddings": tokens})
    settings.use_cache = False
    model = AutoModelForCausalLM.from_config(settings)
    if part.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = zeroengine.initialize(
        model, config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **part.config}
    )

    def micro_step(length: int) -> None:
        ids = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(engine.sample_group))
        loss = engine(**zeroengine.shard_sequence({"input_ids": ids, "labels": ids}, engine=engine)).loss
        engine.backward(loss)

    # The first step makes the buffers of the engine, and compares whole sequences with parts.
    micro_step(WARM_UP_TOKENS)
    engine.step()
    with NewBytes() as trace:
        micro_step(tokens)
    engine.step()
    engine.close()
    return trace.peak_bytes


def measure(part: Part, tokens: int, vocab: int) -> int:
    """Return the peak of rank 0 of fresh processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(part.ranks)]
    command += [__file__, "--rank", part.name, "--tokens", str(tokens), "--vocab", str(vocab)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(json.loads(done.stdout.splitlines()[-1]))


def planned(part: Part, tokens: int, vocab: int) -> int:
    """Return the peak bytes of a micro-step that the planner predicts."""
    config = load(part.config).resolve(world_size=part.ranks)
    return trace_micro_step(facts_of(MODEL | {"vocab_size": vocab}, tokens), config, 1, part.checkpointing).peak_bytes


def print_measured(parts: list[Part], lengths: list[int], vocab: int) -> None:
    """Measure each part at each length, and print a row for it."""
    print(f"torch {torch.__version__}, fp32, two layers of size m, a vocabulary of {vocab:,}; MiB of a rank")
    print(f"{'part':<34}{'tokens':>9}{'peak':>11}{'planned':>11}{'planned/peak':>14}")
    for part in parts:
        for tokens in lengths:
            peak, plan = measure(part, tokens, vocab), planned(part, tokens, vocab)
            row = f"{part.name:<34}{tokens:>9,}{peak / 2**20:>11,.1f}{plan / 2**20:>11,.1f}{plan / peak:>14.3f}"
            print(row, flush=True)


def print_extrapolated() -> None:
    """Print what the planner says of a large model, a row for each part."""
    print("\nextrapolation by the plan, which nothing has measured: 8 B parameters, bf16, eight GPUs of 80 GB, stage 3")
    print(
        f"{'part':<36}" + "".join(f"{tokens:>11,}" for tokens in LARGE_TOKENS) + "   longest that fits (GiB of a GPU)"
    )
    for part in LARGE_PARTS:
        settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, **part.config}
        size = part.config.get("sequence_parallel_size", 1)
        sizes, longest = [], 0
        for tokens in LARGE_TOKENS:
            plan = zeroengine.plan(
                facts_of(LARGE_MODEL, tokens),
                {**settings, "train_micro_batch_size_per_gpu": 1},
                "h100-80gb",
                checkpointing=part.checkpointing,
                # The longest sequence is the same whatever length the plan was asked for.
                sequence_parallel=(size,) if tokens == LARGE_TOKENS[0] else (),
            )
            longest = longest or plan.longest_sequence.get(size, 0)
            sizes.append(f"{plan.estimates[0].device_total / 2**30:>11,.1f}")
        print(f"{part.name:<36}{''.join(sizes)}   {longest:,}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument(
        "--vocab", type=int, default=MODEL["vocab_size"], help="fewer words take less memory for logits"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument("--no-measure", action="store_true", help="the extrapolation alone")
    parser.add_argument("--no-extrapolation", action="store_true", help="what is measured alone")
    parser.add_argument("--rank", metavar="PART", help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {part.name: part for part in PARTS}
    if options.rank:
        dist.init_process_group("gloo")
        peak = measure_rank(by_name[options.rank], options.tokens[0], options.vocab)
        if dist.get_rank() == 0:
            print(json.dumps(peak))
        dist.destroy_process_group()
        return
    if unknown := set(options.only or ()) - set(by_name):
        parser.error(f"--only: no part is called {', '.join(unknown)}; write some of {', '.join(by_name)}")
    if not options.no_measure:
        parts = [part for part in PARTS if not options.only or part.name in options.only]
        print_measured(parts, options.tokens, options.vocab)
    if not options.no_extrapolation:
        print_extrapolated()


if __name__ == "__main__":
    main()
