"""Sections of benchmarks/gpu.py: complete steps, their memory, and offloaded states."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_setting import Rows, Setting, child, table
from torch import Tensor, nn
from workload import ADAMW, CLIP, Transformer, plain_step

RANKS = 64


def build(s: Setting, size: tuple[int, ...], tied: bool = True) -> Transformer:
    torch.manual_seed(0)
    with s.device:
        return Transformer(*size, tied=tied)


def config_of(stage: int, **zero: object) -> dict[str, Any]:
    return {
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }


def engine_of(model: nn.Module, stage: int, **zero: object) -> Any:
    import zeroengine

    return zeroengine.initialize(model, config=config_of(stage, **zero))


def engine_step(engine: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def batch_size(s: Setting) -> int:
    return 4 if s.rehearse or torch.cuda.get_device_properties(0).total_memory > 60 << 30 else 1


def fake_ranks() -> None:
    """Make this process rank 0 of 64, whose collectives move nothing.

    torch's fake gather would copy a shard 64 times.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zeroengine.comm.transports import nccl

    nccl._all_gather = nccl._reduce_scatter = lambda *_, **__: None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


WAYS = {
    "plain": "plain PyTorch",
    "0": "zeroengine, stage 0",
    "3": "zeroengine, stage 3",
    "3 of 64": "zeroengine, stage 3 on rank 0 of 64 that move nothing",
}


def step_of(way: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    if way == "plain":
        return plain_step(model, torch.bfloat16)
    stage, _, ranks = way.partition(" of ")
    if ranks:
        fake_ranks()
    return engine_step(engine_of(model, int(stage), stage3_param_persistence_threshold=0))


def timed(s: Setting, way: str, size: tuple[int, ...], batch: int, steps: int) -> dict[str, float]:
    """Return the seconds per step of one way of training, the last loss, and the number of parameters."""
    *_, vocab, context = size
    model = build(s, size)
    step = step_of(way, model)
    ids = torch.randint(0, vocab, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(s.device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for _ in range(max(steps // 2, 1)):
        step(inputs, labels)
    s.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(inputs, labels)
    s.synchronize()
    elapsed = (time.perf_counter() - start) / steps
    return {"seconds": elapsed, "loss": loss.item(), "numel": sum(p.numel() for p in model.parameters())}


def train(s: Setting, way: str) -> dict[str, float]:
    """Train in one way, in this process, and report tokens/s, the allocator's peak and the last loss."""
    batch = batch_size(s)
    found = timed(s, way, s.model, batch, 2 if s.rehearse else 20)
    return found | {"tokens": batch * s.model[-1] / found["seconds"], "peak": s.peak() / 2**30}


def issue(s: Setting, way: str) -> dict[str, float]:
    """Measure a step of an equally deep model that computes next to nothing: the rest is the host's work."""
    return timed(s, way, (s.model[0], 64, 2, 128, 32), 1, 2 if s.rehearse else 100)


def training(s: Setting) -> str:
    """Measure world size 1 in bf16: plain PyTorch (autocast, fused AdamW), and the engine, in two rounds.

    On one rank nothing is partitioned, and stage 3 takes the path of stage 0. As rank 0 of 64 it gathers and releases
    every unit, from ranks that are not there (torch's `fake` process group): what is left out is the wire, and the
    values mean nothing. "The host's work" is a step of a model as deep, of width 64: the GPU waits for the host there.
    """
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(1 if s.rehearse else 2):
        for way in WAYS:
            runs[way].append(child(s, "train", way))
    host = {way: child(s, "issue", way)["seconds"] for way in WAYS}
    best = {way: max(run["tokens"] for run in its) for way, its in runs.items()}
    rows: Rows = []
    for way, its in runs.items():
        last, slowest = its[-1], min(run["tokens"] for run in its)
        speed = [f"{best[way]:,.0f}", f"{slowest:,.0f}", f"{best[way] / best['plain']:.3f}"]
        loss = "" if " of " in way else f"{last['loss']:.4f}"
        rows.append([WAYS[way], *speed, f"{1e3 * host[way]:.1f}", f"{last['peak']:.1f}", loss])
    head = ["", "tokens/s", "slower round", "over plain", "the host's work, ms a step", "peak GiB", "loss"]
    stages = ", ".join(f"{WAYS[way][12:]}, over stage 0: {best[way] / best['0']:.3f}" for way in ("3", "3 of 64"))
    return f"{runs['0'][0]['numel'] / 1e9:.2f} G parameters.\n\n{table(head, rows)}\n\n{stages}."


# -- memory ---------------------------------------------------------------------------------------------------


def occupy(s: Setting, stage: str, large: str) -> dict[str, float]:
    """Run as rank 0 of 64, and report the allocated bytes after a step and at the peak of the next."""
    fake_ranks()
    engine = engine_of(build(s, s.large if int(large) else s.model, tied=False), int(stage))
    ids = torch.zeros(1, 8, dtype=torch.long, device=s.device)
    step = engine_step(engine)
    step(ids, ids)
    if s.on_gpu:
        s.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    rest = torch.cuda.memory_allocated() if s.on_gpu else 0
    s.peak()
    step(ids, ids)
    params = list(engine.module.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in engine.module.blocks]
    units = sorted([*blocks, *(p.numel() for p in params if p.numel() > max(blocks))])
    optimizer, gradients, parameters = ((RANKS if int(stage) >= i else 1) for i in (1, 2, 3))
    return {
        "formula": sum(p.numel() for p in params) * (2 / parameters + 2 / gradients + 12 / optimizer),
        "buckets": engine.memory().buckets,
        "units": 2 * sum(units[-2:]) if int(stage) == 3 else 0,
        "gradient": 2 * max(p.numel() for p in params),
        "rest": rest,
        "peak": s.peak(),
    }


def memory(s: Setting, large: bool = False) -> str:
    """Measure the allocated bytes of rank 0 of 64 (torch's `fake` process group), beside ZeRO's formula: between steps
    (without the workspaces of cuBLAS), and at the peak of a step on eight tokens.

    Between steps there are the formula's states and the buckets of gradients, which are kept. At the peak there may be
    the two largest units as well, gathered at stage 3, and the largest parameter's gradient, as autograd makes it
    before it is copied to its bucket. The rest is activations and cuBLAS.
    """
    rows: Rows = []
    for stage in (1, 2, 3) if large else (0, 1, 2, 3):
        try:
            run = child(s, "occupy", str(stage), str(int(large)))
        except RuntimeError as error:
            rows.append([stage, *[""] * 6, f"failed: {str(error).splitlines()[-1]}"])
            continue
        kept = run["formula"] + run["buckets"]
        gib = [f"{run[name] / 2**30:.2f}" for name in ("formula", "buckets", "rest")]
        at_most = kept + run["units"] + run["gradient"]
        peak = [f"{run['peak'] / 2**30:.2f}", f"{run['peak'] / at_most:.3f}"]
        rows.append([stage, *gib, f"{run['rest'] / kept:.3f}", f"{at_most / 2**30:.2f}", *peak])
    between = ["formula GiB", "buckets GiB", "between steps GiB", "over formula and buckets"]
    return table(["stage", *between, "at most GiB", "peak GiB", "over that"], rows)


def large_memory(s: Setting) -> str:
    """Measure the same for ZeRO's row of 7.5 G parameters, if the GPU is large enough."""
    if not s.rehearse and torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        return "Not measured: building the model whole takes a GPU of 100 GiB."
    return memory(s, large=True)


# -- offload --------------------------------------------------------------------------------------------------

CPU = {"device": "cpu", "pin_memory": True}
OFFLOAD: dict[str, Any] = {"offload_optimizer": CPU, "overlap_comm": True}


def offloaded(s: Setting, way: str) -> dict[str, float]:
    """Run ZeRO-Offload with one engine, in this process, and report tokens/s and the allocator's peak."""
    *_, vocab, context = s.model
    model, batch = build(s, s.model), batch_size(s)
    if way == "DeepSpeed":
        import deepspeed

        for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", "29517")
        config = config_of(2, **OFFLOAD) | {"train_micro_batch_size_per_gpu": batch}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    else:
        engine = engine_of(model, 2, **OFFLOAD)
    step = engine_step(engine)
    ids = torch.randint(0, vocab, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(s.device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    steps = 2 if s.rehearse else 6
    for _ in range(2):
        step(inputs, labels)
    s.synchronize()
    s.peak()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(inputs, labels)
    s.synchronize()
    elapsed = time.perf_counter() - start
    return {"tokens": steps * batch * context / elapsed, "peak": s.peak() / 2**30, "loss": loss.item()}


def offload(s: Setting) -> str:
    """Measure ZeRO-Offload (the optimizer in CPU memory) beside DeepSpeed, in two rounds.

    Stage 2, world size 1, bf16, `overlap_comm`.
    """
    runs: dict[str, list[dict[str, float]]] = {"zeroengine": [], "DeepSpeed": []}
    failed: dict[str, str] = {}
    for _ in range(1 if s.rehearse else 2):
        for way in [way for way in runs if way not in failed]:
            try:
                runs[way].append(child(s, "offloaded", way))
            except RuntimeError as error:
                failed[way] = str(error).splitlines()[-1]
    rows: Rows = [[way, f"failed: {reason}", "", "", ""] for way, reason in failed.items()]
    for way, its in runs.items():
        if way not in failed:
            tokens = [run["tokens"] for run in its]
            rows.append([way, f"{max(tokens):,.0f}", f"{min(tokens):,.0f}", *_last(its[-1])])
    text = table(["", "tokens/s", "slower round", "peak GiB", "loss"], rows)
    if not failed:
        best = {way: max(run["tokens"] for run in its) for way, its in runs.items()}
        text += f"\n\nzeroengine over DeepSpeed: {best['zeroengine'] / best['DeepSpeed']:.2f}."
    return text


def _last(run: dict[str, float]) -> list[str]:
    return [f"{run['peak']:.1f}", f"{run['loss']:.4f}"]


def grow(s: Setting, layers: str, ratio: str) -> dict[str, float]:
    """Take two steps of a model with that many layers and ``ratio`` of its optimizer in CPU memory."""
    import zeroengine

    _, *rest = s.large
    config = config_of(2, offload_optimizer=CPU | {"ratio": float(ratio)})
    torch.manual_seed(0)
    with zeroengine.meta_init(config), s.device:  # drawn on the GPU, a unit at a time
        model = Transformer(int(layers), *rest)
    engine = zeroengine.initialize(model, config=config)
    ids = torch.zeros(1, rest[-1], dtype=torch.long, device=s.device)
    step = engine_step(engine)
    step(ids, ids)
    s.synchronize()
    start = time.perf_counter()
    step(ids, ids)
    s.synchronize()
    numel = sum(param.numel() for param in model.parameters())
    return {
        "numel": numel,
        "step": time.perf_counter() - start,
        "peak": s.peak() / 2**30,
        "host": sum(engine.memory().cpu.values()),
    }


def largest(s: Setting) -> str:
    """Find the largest model that takes steps on this GPU with this machine's CPU memory: stage 2, bf16, as much of the
    optimizer on the GPU as fits. A size that fails is made a tenth smaller."""
    from zeroengine.offload.host_memory import available_memory

    _, width, *_, context = s.large
    gpu = 1e7 if s.rehearse else 0.8 * torch.cuda.get_device_properties(0).total_memory
    host = 1e7 if s.rehearse else min(0.85 * available_memory(), 64 << 30)  # locking pages takes its time
    # Of each parameter 14 bytes on either side, 2 on the GPU, and there a layer's activations (34 bytes of each
    # element, and as much again to be safe) for its 12 x width^2 parameters.
    activations = 68 * context / (12 * width)
    numel, failures = min((gpu + host) / (16 + activations), gpu / (2.5 + activations)), []
    for _ in range(4):
        layers, ratio = max(int(numel / (12 * width * width)), 1), min(host / (14 * numel), 1.0)
        try:
            run = child(s, "grow", str(layers), f"{ratio:.3f}")
        except RuntimeError as error:
            failures.append(f"{numel / 1e9:.1f} G parameters failed: {str(error).splitlines()[-1][:200]}")
            numel *= 0.9
            continue
        found = (
            f"{run['numel'] / 1e9:.2f} G parameters, ratio {ratio:.2f}: {run['step']:.1f} s a step, at the peak "
            f"{run['peak']:.0f} GiB on the GPU, {run['host'] / 2**30:.0f} GiB of CPU memory."
        )
        return "\n\n".join([found, *failures])
    raise RuntimeError("; ".join(failures))
