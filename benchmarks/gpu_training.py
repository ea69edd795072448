"""Parts of benchmarks/gpu.py: complete steps, their memory, offloaded states, and checkpoints."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from gpu_setting import Found, Rows, Setting, child, reason_of, table
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
    return 4 if s.dry_run or torch.cuda.get_device_properties(0).total_memory > 60 << 30 else 1


def fake_ranks() -> None:
    """Make this process rank 0 of 64, whose collectives move nothing.

    torch's fake gather would copy a shard 64 times.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zeroengine.comm.transports import nccl

    nccl._all_gather = nccl._reduce_scatter = lambda *_, **__: None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


def sequences(s: Setting, size: tuple[int, ...], batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random token ids and their labels."""
    *_, vocab, context = size
    ids = torch.randint(0, vocab, (batch, context + 1), generator=torch.Generator().manual_seed(seed)).to(s.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# -- one rank of many -----------------------------------------------------------------------------------------


def same(s: Setting) -> dict[str, float]:
    """Take three steps at stage 0 and at stage 3, as rank 0 of 64, that change nothing. Count what is equal."""
    import one_of_many

    one_of_many.join(s.device, RANKS)
    size = s.model if s.dry_run else (4, 1024, 16, 8192, 512)
    batches = [sequences(s, size, 2, seed) for seed in range(3)]
    found = []
    for stage in (0, 3):
        config = config_of(stage, param_persistence_threshold=0)
        config["optimizer"]["params"] = ADAMW | {"lr": 0.0}
        found.append(one_of_many.losses_and_gradients(build(s, size), config, batches))
    (losses, whole), (losses_3, parts) = found
    gradients = [one_of_many.is_part(part, all_) for part, all_ in zip(parts, whole, strict=True)]
    equal = [a == b for a, b in zip(losses, losses_3, strict=True)]
    return {"losses": sum(equal), "gradients": sum(gradients), "of": len(batches), "loss": losses_3[0]}


def stage_3_is_right(s: Setting) -> Found:
    """Compare stage 3 with stage 0 on rank 0 of 64, with real collectives and values (`one_of_many.py`), in bf16."""
    run = child(s, "same")
    text = (
        f"{run['losses']:.0f} of {run['of']:.0f} losses (the first is {run['loss']:.4f}) and the gradient shards of "
        f"{run['gradients']:.0f} of {run['of']:.0f} steps have the bits of stage 0."
    )
    return text, [(run["losses"] + run["gradients"]) / (2 * run["of"])]


def waits(s: Setting) -> dict[str, float]:
    """Take steps at stage 3 as rank 0 of 64, and fail where the host waits for the GPU in forward, backward or step."""
    import one_of_many

    one_of_many.join(s.device, RANKS)
    size = s.model if s.dry_run else (4, 1024, 16, 8192, 512)
    engine = one_of_many.initialize(build(s, size), config_of(3, param_persistence_threshold=0))
    step, batch = engine_step(engine), sequences(s, size, 2)
    # The first ones allocate, and a step reads the norm of the one before, which has arrived.
    for _ in range(3):
        step(*batch)
        s.synchronize()
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        step(*batch)
        torch.cuda.set_sync_debug_mode("default")
        s.synchronize()
    engine.close()
    return {"steps": 3}


def nothing_waits(s: Setting) -> Found:
    """Take steps at stage 3 under `torch.cuda.set_sync_debug_mode("error")`."""
    if not s.on_gpu:
        return "Only a GPU runs behind its host.", ["there is no GPU"]
    return f"{child(s, 'waits')['steps']:.0f} steps without a wait.", [0.0]


# -- speed ----------------------------------------------------------------------------------------------------

WAYS = {
    "plain": "plain PyTorch, autocast",
    "fsdp2": "FSDP2 on one rank",
    "0": "zeroengine, stage 0",
    "3": "zeroengine, stage 3 on rank 0 of 64",
}


def prepare(s: Setting, way: str) -> None:
    """Start the process group of one way of training."""
    if way == "fsdp2":
        backend = "nccl" if s.on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif way == "3":
        import one_of_many

        one_of_many.join(s.device, RANKS)


def step_of(way: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the step of one way of training, whose process group is there."""
    if way == "plain":
        return plain_step(model, torch.bfloat16)
    if way == "0":
        return engine_step(engine_of(model, 0))
    if way == "3":
        import one_of_many

        return engine_step(one_of_many.initialize(model, config_of(3, param_persistence_threshold=0)))
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)  # type: ignore[arg-type]
    fully_shard(model, mp_policy=policy)
    return plain_step(model, None)


def timed(s: Setting, way: str, size: tuple[int, ...], batch: int, steps: int) -> dict[str, float]:
    """Return the seconds per step of one way of training, the last loss, and the number of parameters."""
    model = build(s, size)
    numel = sum(p.numel() for p in model.parameters())
    step = step_of(way, model)
    inputs, labels = sequences(s, size, batch)
    for _ in range(max(steps // 2, 1)):
        step(inputs, labels)
    s.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(inputs, labels)
    s.synchronize()
    elapsed = (time.perf_counter() - start) / steps
    return {"seconds": elapsed, "loss": loss.item(), "numel": numel}


def train(s: Setting, way: str) -> dict[str, float]:
    """Train in one way, in this process, and report tokens/s, the allocator's peak and the last loss.

    "issue" is the seconds of a step of a model as deep that computes next to nothing: the rest is the host's work.
    """
    prepare(s, way)
    batch = batch_size(s)
    found = timed(s, way, s.model, batch, 2 if s.dry_run else 12)
    found |= {"tokens": batch * s.model[-1] / found["seconds"], "peak": s.peak() / 2**30}
    gc.collect()
    return found | {"issue": timed(s, way, (s.model[0], 64, 2, 128, 32), 1, 2 if s.dry_run else 60)["seconds"]}


def in_rounds(
    s: Setting, name: str, ways: Iterable[str], failed: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """Run the child `name` for each way in turn, in two rounds. Return its results, and the reasons of what failed.

    Args:
        s: The setting.
        name: The child.
        ways: Its argument in each process.
        failed: Ways that are left out, with the reason.
    """
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    reasons = dict(failed)
    for _ in range(1 if s.dry_run else 2):
        for way in [way for way in runs if way not in reasons]:
            try:
                runs[way].append(child(s, name, way))
            except RuntimeError as error:
                reasons[way] = reason_of(str(error))
    return runs, reasons


def training(s: Setting) -> Found:
    """Measure steps in bf16 in two rounds: plain PyTorch (fused AdamW), FSDP2, and the engine.

    At stage 3 the engine is rank 0 of 64, with real collectives from memory in place of the wire, and updates a 64th of
    the parameters. FSDP2 is one rank, which copies as much and updates all. "The host's work" is a step of a model as
    deep, of width 64: the GPU waits for the host there.
    """
    runs, failed = in_rounds(s, "train", WAYS)
    best = {way: max(run["tokens"] for run in its) for way, its in runs.items() if way not in failed}
    host = {way: min(run["issue"] for run in its) for way, its in runs.items() if way not in failed}
    rows: Rows = [[WAYS[way], f"failed: {reason}", *[""] * 5] for way, reason in failed.items()]
    for way, tokens in best.items():
        its = runs[way]
        over = f"{tokens / best['plain']:.3f}" if "plain" in best else ""
        rows.append(
            [
                *(WAYS[way], f"{tokens:,.0f}", f"{min(run['tokens'] for run in its):,.0f}", over),
                *(f"{1e3 * host[way]:.1f}", f"{its[-1]['peak']:.1f}", f"{its[-1]['loss']:.4f}"),
            ]
        )
    head = ["", "tokens/s", "slower round", "over plain", "the host's work, ms a step", "peak GiB", "loss"]

    def ratio(values: dict[str, float], way: str, other: str) -> float | str:
        missing = next((name for name in (way, other) if name in failed), None)
        return values[way] / values[other] if missing is None else f"{WAYS[missing]}: {failed[missing]}"

    numel = next((its[0]["numel"] for its in runs.values() if its), 0)
    text = f"{numel / 1e9:.2f} G parameters.\n\n{table(head, rows)}"
    # A step's time is the inverse of its tokens/s.
    found = [ratio(best, "0", "3"), ratio(best, "3", "fsdp2"), ratio(best, "0", "plain")]
    return text, [*found, ratio(host, "3", "fsdp2")]


# -- memory ---------------------------------------------------------------------------------------------------


def occupy(s: Setting, stage: str, large: str) -> dict[str, float]:
    """Run as rank 0 of 64, and report the allocated bytes after a step and at the peak of the next."""
    fake_ranks()
    engine = engine_of(build(s, s.large if int(large) else s.model, tied=False), int(stage))
    ids = torch.zeros(1, 8, dtype=torch.long, device=s.device)
    step = engine_step(engine)
    step(ids, ids)
    s.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    rest = torch.cuda.memory_allocated()
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


def memory(s: Setting, large: bool = False) -> Found:
    """Measure the allocated bytes of rank 0 of 64 (torch's `fake` process group), beside ZeRO's formula: between steps
    (without the workspaces of cuBLAS), and at the peak of a step on eight tokens.

    Between steps there are the formula's states and the buckets of gradients, which are kept. At the peak there may be
    the two largest units as well, gathered at stage 3, and the largest parameter's gradient, as autograd makes it
    before it is copied to its bucket. The rest is activations and cuBLAS.
    """
    if not s.on_gpu:
        return "Only a GPU's allocator counts its bytes.", ["there is no GPU"]
    rows: Rows = []
    over: float | str = ""
    for stage in (1, 2, 3) if large else (0, 1, 2, 3):
        try:
            run = child(s, "occupy", str(stage), str(int(large)))
        except RuntimeError as error:
            over = reason_of(str(error))
            rows.append([stage, *[""] * 6, f"failed: {over}"])
            continue
        kept = run["formula"] + run["buckets"]
        gib = [f"{run[name] / 2**30:.2f}" for name in ("formula", "buckets", "rest")]
        over = run["rest"] / kept
        at_most = kept + run["units"] + run["gradient"]
        peak = [f"{run['peak'] / 2**30:.2f}", f"{run['peak'] / at_most:.3f}"]
        rows.append([stage, *gib, f"{run['rest'] / kept:.3f}", f"{at_most / 2**30:.2f}", *peak])
    between = ["formula GiB", "buckets GiB", "between steps GiB", "over formula and buckets"]
    return table(["stage", *between, "at most GiB", "peak GiB", "over that"], rows), [over]


def large_memory(s: Setting) -> Found:
    """Measure the same for ZeRO's row of 7.5 G parameters, if the GPU is large enough."""
    if not s.dry_run and torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        return "Not measured: building the model whole takes a GPU of 100 GiB.", []
    return memory(s, large=True)[0], []


# -- offload --------------------------------------------------------------------------------------------------

CPU = {"device": "cpu", "pin_memory": True}
OFFLOAD: dict[str, Any] = {"offload_optimizer": CPU, "overlap_comm": True}


def offloaded(s: Setting, way: str) -> dict[str, float]:
    """Run ZeRO-Offload with one engine, in this process, and report tokens/s and the allocator's peak."""
    model, batch, context = build(s, s.model), batch_size(s), s.model[-1]
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
    inputs, labels = sequences(s, s.model, batch)
    steps = 2 if s.dry_run else 6
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


def offload(s: Setting) -> Found:
    """Measure ZeRO-Offload (the optimizer in CPU memory) beside DeepSpeed, in two rounds.

    Stage 2, world size 1, bf16, `overlap_comm`.
    """
    # DeepSpeed compiles its optimizer at the first use, which takes a minute.
    left_out = {} if s.on_gpu else {"DeepSpeed": "there is no GPU"}
    runs, failed = in_rounds(s, "offloaded", ("zeroengine", "DeepSpeed"), left_out)
    rows: Rows = [[way, f"failed: {reason}", "", "", ""] for way, reason in failed.items()]
    for way, its in runs.items():
        if way not in failed:
            tokens = [run["tokens"] for run in its]
            rows.append([way, f"{max(tokens):,.0f}", f"{min(tokens):,.0f}", *_last(its[-1])])
    text = table(["", "tokens/s", "slower round", "peak GiB", "loss"], rows)
    if failed:
        return text, ["; ".join(f"{way}: {reason}" for way, reason in failed.items())]
    best = {way: max(run["tokens"] for run in its) for way, its in runs.items()}
    return text, [best["zeroengine"] / best["DeepSpeed"]]


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


def largest(s: Setting) -> Found:
    """Find the largest model that takes steps on this GPU with this machine's CPU memory: stage 2, bf16, as much of the
    optimizer on the GPU as fits. A size that fails is made a tenth smaller."""
    from zeroengine.offload.host_memory import available_memory

    _, width, *_, context = s.large
    gpu = 1e7 if s.dry_run else 0.8 * torch.cuda.get_device_properties(0).total_memory
    host = 1e7 if s.dry_run else min(0.85 * available_memory(), 64 << 30)  # locking pages takes its time
    # Of each parameter 14 bytes on either side, 2 on the GPU, and there a layer's activations (34 bytes of each
    # element, and as much again to be safe) for its 12 x width^2 parameters.
    activations = 68 * context / (12 * width)
    numel, failures = min((gpu + host) / (16 + activations), gpu / (2.5 + activations)), []
    for _ in range(4):
        layers, ratio = max(int(numel / (12 * width * width)), 1), min(host / (14 * numel), 1.0)
        try:
            run = child(s, "grow", str(layers), f"{ratio:.3f}")
        except RuntimeError as error:
            failures.append(f"{numel / 1e9:.1f} G parameters failed: {reason_of(str(error))[:200]}")
            numel *= 0.9
            continue
        found = (
            f"{run['numel'] / 1e9:.2f} G parameters, ratio {ratio:.2f}: {run['step']:.1f} s a step, at the peak "
            f"{run['peak']:.0f} GiB on the GPU, {run['host'] / 2**30:.0f} GiB of CPU memory."
        )
        return "\n\n".join([found, *failures]), []
    raise RuntimeError("; ".join(failures))


# -- checkpoints ----------------------------------------------------------------------------------------------


def saves(s: Setting) -> dict[str, float]:
    """Take steps with a save beside training between two of them, and report what that costs in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        import zeroengine

        config = config_of(0) | {"checkpoint": {"async_save": True}}
        engine = zeroengine.initialize(build(s, s.model), config=config)
        step, batch = engine_step(engine), sequences(s, s.model, batch_size(s))

        def seconds(before: Callable[[], object]) -> float:
            s.synchronize()
            start = time.perf_counter()
            before()
            step(*batch)
            s.synchronize()
            return time.perf_counter() - start

        # The first save makes its memory and imports torch's part of checkpoints.
        for _ in range(2):
            seconds(lambda: None)
        engine.save_checkpoint(folder, tag="first")
        engine.wait_for_checkpoint()
        ordinary = min(seconds(lambda: None) for _ in range(3))
        call = 0.0

        def save() -> None:
            nonlocal call
            start = time.perf_counter()
            engine.save_checkpoint(folder, tag="second")
            call = time.perf_counter() - start

        with_save = seconds(save)
        engine.wait_for_checkpoint()
        engine.close()
    return {"ordinary": ordinary, "with": with_save, "call": call}


def checkpoint_pause(s: Setting) -> Found:
    """Measure a step with a save beside training, stage 0 on one rank, beside a step without."""
    run = child(s, "saves")
    text = (
        f"A step takes {run['ordinary']:.2f} s, with a save {run['with']:.2f} s; the call returns after "
        f"{run['call']:.2f} s."
    )
    return text, [(run["with"] - run["ordinary"]) / run["ordinary"]]
