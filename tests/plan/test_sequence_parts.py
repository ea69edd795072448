from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from benchmarks.sequence_memory import NewBytes
from benchmarks.sequence_memory import facts_of as measured_facts
from tests.distributed.ranks import run_ranks
from zeroengine.config import load
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.plan.search.candidates import Choices, PlanCandidate, micro_batches
from zeroengine.plan.search.estimator import Estimator
from zeroengine.plan.seconds.known_machines import load_machine
from zeroengine.plan.trace.activations import MicroStep, trace_micro_step
from zeroengine.plan.trace.model_facts import ModelFacts, from_module
from zeroengine.plan.trace.standard_decoder import StandardDecoder
from zeroengine.sequence import tiled_loss

VOCAB, LAYERS, WIDTH, HEADS, TOKENS = 256, 2, 64, 4, 1024
MACHINE = load_machine("h100-80gb")
STAGE_1 = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}, "optimizer": {"type": "AdamW"}}


def decoder() -> StandardDecoder:
    return StandardDecoder(VOCAB, LAYERS, WIDTH, HEADS, 3 * WIDTH, HEADS)


def facts_of(model: nn.Module, tokens: int = TOKENS) -> ModelFacts:
    def make_batch(samples: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(2, samples, tokens, dtype=torch.int64, device="meta").unbind()

    return from_module(model.to("meta"), "decoder", make_batch)


def trace(size: int, checkpointing: bool = False, tokens: int = TOKENS) -> MicroStep:
    config = load({"sequence_parallel_size": size}).resolve(world_size=size)
    return trace_micro_step(facts_of(decoder(), tokens), config, 1, checkpointing)


def train(folder: str) -> dict[int, tuple[int, int]]:
    """Return the peak and the bytes of staging memory, without and with ranks that share a sample."""
    found = {}
    for size in (1, 2):
        config = {"sequence_parallel_size": size, "monitor": {"folder": f"{folder}/{size}"}}
        engine = zeroengine.initialize(decoder(), config={**config, "optimizer": {"type": "AdamW"}})
        for step in range(2):
            # Length and values differ between steps, and between samples.
            tokens = TOKENS if step else TOKENS // 4
            generator = torch.Generator().manual_seed(engine.sample_group + step)
            batch = torch.randint(VOCAB, (2, 1, tokens), generator=generator)
            ids, labels = zeroengine.shard_sequence(list(batch), engine=engine)
            with NewBytes() as counter:
                mean = engine(ids, labels)
                loss = zeroengine.mean_loss(mean * labels.numel(), labels.numel(), engine=engine)
                engine.backward(loss)
            if step == 1:
                found[size] = counter.peak_bytes, engine.memory().staging
            engine.step()
        engine.close()
    return found


def test_parts_of_sequences_are_planned_counted_and_recorded(tmp_path: Path) -> None:
    for found in run_ranks(2, train, str(tmp_path)):
        for size, (peak, _) in found.items():
            assert trace(size).peak_bytes == pytest.approx(peak, rel=0.1)
        assert found[1][1] == 0 < found[2][1] < found[2][0] / 2
    records = {
        size: [json.loads(line) for line in (tmp_path / str(size) / "steps.jsonl").read_text().splitlines()][1]
        for size in (1, 2)
    }
    assert [records[size]["samples"] for size in (1, 2)] == [2, 1], "the ranks of a group share a sample"
    assert [records[size]["tokens"] for size in (1, 2)] == [2 * TOKENS, TOKENS]
    assert records[1]["flops"] == pytest.approx(2 * records[2]["flops"], rel=0.01), "attention is of whole sequences"
    assert records[1]["traffic"]["exchange_bytes"] == records[1]["split"]["exchange"] == 0
    # The mean of the loss takes some bytes more.
    assert 0 < records[2]["traffic"]["exchange_bytes"] - trace(2).exchanged_bytes < 64
    assert records[2]["split"]["exchange"] > 0


def test_activations_and_operations_are_divided_by_the_ranks_that_share_a_sample() -> None:
    size, whole, part = 4, trace(1), trace(4)
    assert size * part.saved_bytes == pytest.approx(whole.saved_bytes, rel=0.2), "what is sent from is not divided"
    flops = [sum(o.flops * o.count for o in (*m.forward, *m.backward)) for m in (whole, part)]
    assert size * flops[1] == flops[0]
    # Query, key, value and output, of which a share stays; in forward and backward, and in recomputation again.
    exchanged = 4 * LAYERS * WIDTH * 4 * TOKENS // size * (size - 1) // size
    assert part.exchanged_bytes == 2 * exchanged
    assert trace(size, checkpointing=True).exchanged_bytes == 3 * exchanged
    assert whole.exchanged_bytes == 0


def test_a_plan_compares_numbers_of_ranks_that_share_a_sample() -> None:
    options: dict[str, Any] = {"batch": 8, "checkpointing": False}
    plan = zeroengine.plan(facts_of(decoder()), STAGE_1, MACHINE, sequence_parallel=(1, 4), **options)
    number = next(n for n, e in enumerate(plan.estimates) if e.candidate.sequence_parallel == 4)
    estimate, tree = plan.estimates[number], plan.configuration(number + 1)
    assert (tree["sequence_parallel_size"], tree["train_batch_size"], estimate.samples) == (4, 8, 8)
    load(tree).resolve(world_size=8)
    assert 3 < plan.longest_sequence[4] / plan.longest_sequence[1] < 4.2
    assert "SP 4" in str(plan) and f"sequence_parallel_size 4: {plan.longest_sequence[4]:,} tokens" in str(plan)
    # Between nodes, of which each has a network for all of its ranks, an exchange takes longer.
    nodes = replace(MACHINE, nodes=4, ranks_per_node=2)
    for machine, link in ((MACHINE, MACHINE.rates.link), (nodes, nodes.rates.node_link / 2)):
        estimate = Estimator(facts_of(decoder()), STAGE_1, machine).estimate(estimate.candidate)
        assert estimate.time is not None and estimate.micro is not None
        sent = estimate.candidate.accumulation * estimate.micro.exchanged_bytes
        assert estimate.time.exchange == pytest.approx(sent / min(link, MACHINE.rates.link))
    # With a given number of micro-steps each number of ranks has another micro-batch.
    fixed = Choices(batch=8, accumulation=2)
    assert [micro_batches(fixed, num_groups, 1, 1) for num_groups in (1, 2, 4)] == [[4], [2], [1]]
    with pytest.raises(ConfigError, match="sequence_parallel_size is 3, and must divide"):
        zeroengine.plan(facts_of(decoder()), STAGE_1, MACHINE, sequence_parallel=(1, 3), **options)


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    machine = replace(MACHINE, device_bytes=3 << 30)
    estimator = Estimator(facts_of(decoder()), STAGE_1, machine)
    choices = Choices(stages=(1,), offload_optimizer=("none",), offload_param=("none",))
    one = estimator.longest_sequence(choices, 1)
    for tokens, fits in ((one, True), (one + 1024, False)):
        longer = Estimator(facts_of(decoder(), tokens), STAGE_1, machine)
        assert longer.estimate(PlanCandidate(1, "none", "none", 1, 1, checkpointing=True)).fits == fits
    tiny = Estimator(facts_of(decoder()), STAGE_1, replace(MACHINE, device_bytes=1 << 20))
    assert tiny.longest_sequence(choices, 1) == 0


TILED = {"tiling": {"loss": True, "mlp": True}}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 96}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 2048}
# The MLPs have seven tiles, and the loss has ten.
LENGTH, LOSS_BYTES = 640, (1 << 20, 1 << 20)


def train_in_tiles() -> int:
    """Return the peak bytes of a micro-step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiled_loss.CPU_BYTES = LOSS_BYTES
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = zeroengine.initialize(model, config=TILED | {"optimizer": {"type": "AdamW"}})
    for tokens in (16, LENGTH):
        ids = torch.randint(9, (1, tokens))
        with NewBytes() as counter:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.close()
    return counter.peak_bytes


def test_tiles_take_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(tiled_loss, "CPU_BYTES", LOSS_BYTES)
    facts, sizes = measured_facts(LLAMA, LENGTH), []
    for more in (TILED, {"tiling": {"loss": True}}, {"tiling": {"mlp": True}}):
        micro = trace_micro_step(facts, load(more).resolve(world_size=1), 1, checkpointing=True)
        sizes.append((micro.peak_bytes, sum(o.flops * o.count for o in micro.forward)))
    assert sizes[0][0] == pytest.approx(run_ranks(1, train_in_tiles)[0], rel=0.01)
    assert 2 * sizes[0][0] < min(sizes[1][0], sizes[2][0])
    # The forward of a loss in tiles computes its gradients, and few tiles stand for all.
    head = 2 * LENGTH * 4096 * 96
    assert sizes[0][1] == sizes[1][1] == pytest.approx(sizes[2][1] + 2 * head, rel=0.02)


@pytest.mark.parametrize("layers", [4, 12])
def test_inputs_of_checkpoints_are_planned_in_cpu_memory(layers: int) -> None:
    facts = facts_of(StandardDecoder(VOCAB, layers, WIDTH, HEADS, 3 * WIDTH, HEADS))
    steps = []
    for on_host, device in ((False, "cuda"), (True, "cuda"), (True, "cpu")):
        config = load({"activation_checkpointing": {"cpu_checkpointing": on_host}}).resolve(world_size=1)
        steps.append(trace_micro_step(facts, config, 1, checkpointing=True, device=device))
    plain, moved, on_cpu = steps
    hidden = TOKENS * WIDTH * 4
    # As measured on a device: see test_host_activations.
    assert plain.peak_bytes - moved.peak_bytes == (layers - 3) * hidden
    assert (plain.host_bytes, moved.host_bytes, on_cpu.host_bytes) == (0, layers * hidden, 0)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x).mean()


def test_a_model_that_exchanges_nothing_is_refused() -> None:
    with pytest.raises(ZeroEngineError, match=r"needs zeroengine\.sequence_parallel\.attention"):
        zeroengine.plan(facts_of(OwnAttention()), machine=MACHINE, sequence_parallel=(2,))
    images = from_module(nn.Linear(4, 4).to("meta"), "images", lambda n: torch.zeros(n, 4, device="meta"))
    with pytest.raises(ZeroEngineError, match="its samples have none"):
        zeroengine.plan(images, machine=MACHINE, sequence_parallel=(2,))
