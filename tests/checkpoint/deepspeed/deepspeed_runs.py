"""Trains a small model under DeepSpeed, saves its checkpoint, and sets aside what DeepSpeed holds and computes next.

python -m tests.checkpoint.deepspeed.deepspeed_runs       writes data/deepspeed.tar.xz and data/deepspeed.json anew
python -m tests.checkpoint.deepspeed.deepspeed_runs split     the same of data/split: runs of 2 x 2 ranks with AutoTP
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn import functional as F

from tests.distributed.ranks import run_ranks
from tests.distributed.training import start

DATA = Path(__file__).parent / "data"
VOCAB, WIDTH = 11, 5  # sizes that no alignment divides
MOMENTS = ("exp_avg", "exp_avg_sq")
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 34, "hysteresis": 1}}
# DeepSpeed's own linear layer at stage 3 rounds otherwise than torch's, and stays for what is run after it.
STAGE_3 = {"stage": 3, "memory_efficient_linear": False}
# What DeepSpeed is told beside what all runs share.
RUNS: dict[str, dict[str, Any]] = {
    "fp32-1": {"zero_optimization": {"stage": 1}},
    "fp32-2": {"zero_optimization": {"stage": 2}},
    "fp32-3": {"zero_optimization": {**STAGE_3}},
    "bf16-1": {"zero_optimization": {"stage": 1}, **BF16},
    "bf16-2": {"zero_optimization": {"stage": 2}, **BF16},
    "bf16-3": {"zero_optimization": {**STAGE_3}, **BF16},
    "fp16-2": {"zero_optimization": {"stage": 2}, **FP16},
    "fp16-3": {"zero_optimization": {**STAGE_3}, **FP16},
    "fp32-gradients": {"zero_optimization": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    # Trains as fp32-2 does. What DeepSpeed's safe_get_full_* give here are other parameters' elements.
    "round-robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "aligned": {"zero_optimization": {"stage": 2, "parameter_alignment": True}, **BF16},
    "sub-groups": {"zero_optimization": {**STAGE_3, "sub_group_size": 20}, **BF16},
    "offloaded": {"zero_optimization": {**STAGE_3, "offload_optimizer": {"device": "cpu"}}, **BF16},
    "fused": {"zero_optimization": {"stage": 2}, **BF16, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}},
}
KEPT = tuple(RUNS)  # in data
# Runs of a Llama that DeepSpeed's AutoTP splits over two ranks, each on two ranks with the same slices.
SPLIT_RUNS: dict[str, dict[str, Any]] = {
    "split-1": {"zero_optimization": {"stage": 1}, **BF16},
    "split-2": {"zero_optimization": {"stage": 2}},
    "split-3": {"zero_optimization": {**STAGE_3}},
    "tied-2": {"zero_optimization": {"stage": 2}},
}


class Small(nn.Module):
    """Tied embedding and head, a frozen layer, shared weights, a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank, so their number changes nothing but rounding."""
    first = torch.randint(0, VOCAB, (2, 1), generator=torch.Generator().manual_seed(step))
    sequence = (first + torch.arange(5)) % VOCAB
    return sequence[:, :-1], sequence[:, 1:]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95), eps=1e-5)


SHARED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 3e-3}},
}


def run(root: Path, names: Sequence[str]) -> None:
    """Trains, on this rank, each run in turn; leaves its checkpoint ``root/name`` and ``root/name.pt``."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "LOCAL_RANK": os.environ["RANK"]}
    start()
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slowly, on a CPU
    for name in names:
        torch.manual_seed(0)
        model = Small()
        config = SHARED | RUNS[name] | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        optimizer = None if "optimizer" in config else adamw(model)
        parameters = groups(model) if optimizer is None else None
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)
        steps = 0
        while engine.global_steps - engine.skipped_steps < 3:
            train(engine, steps)
            steps += 1
        engine.save_checkpoint(str(root / name), client_state={"epoch": 1, "best": torch.tensor([0.5])})
        found = held(engine)
        found["losses"] = [train(engine, step) for step in range(steps, steps + 3)]
        if torch.distributed.get_rank() == 0:
            torch.save(found, root / f"{name}.pt")
        engine.destroy()


def llama(name: str) -> Any:
    """Return the model of a run in ``SPLIT_RUNS``."""
    import transformers

    sizes = {"vocab_size": VOCAB + 1, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=name.startswith("tied"))
    return transformers.LlamaForCausalLM(config)


def split_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)


def train_split(engine: Any, step: int, sample_group: int) -> float:
    """Train on the samples of the ranks that hold one model together."""
    ids = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(10 * step + sample_group))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def run_split(root: Path, names: Sequence[str]) -> None:
    """As ``run``, of ``SPLIT_RUNS`` on four ranks."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "LOCAL_RANK": os.environ["RANK"]}
    start()
    import deepspeed

    rank = torch.distributed.get_rank()
    for name in names:
        model = llama(name)
        shapes = {key: param.shape for key, param in model.named_parameters()}
        more = {"tensor_parallel": {"autotp_size": 2}, "zero_allow_untested_optimizer": True}
        config = {key: value for key, value in SHARED.items() if key != "scheduler"} | SPLIT_RUNS[name] | more
        config["zero_force_ds_cpu_optimizer"] = False
        engine, *_ = deepspeed.initialize(model=model, optimizer=split_adamw(model), config=config)
        for step in range(3):
            train_split(engine, step, rank // 2)
        engine.save_checkpoint(str(root / name), client_state={"epoch": 1})
        state = {key: whole(key, value, shapes) for key, value in held_values(engine).items()}
        losses = torch.tensor([train_split(engine, step, rank // 2) for step in range(3, 6)]) / 4
        torch.distributed.all_reduce(losses)
        if rank == 0:
            torch.save({"state": state, "losses": losses.tolist()}, root / f"{name}.pt")
        engine.destroy()


def whole(key: str, value: torch.Tensor, shapes: dict[str, torch.Size]) -> torch.Tensor:
    """Return what ranks 0 and 1 have of a parameter or a moment together."""
    shape = shapes[key.partition(" ")[0]]
    parts = [torch.empty_like(value) for _ in range(4)]
    torch.distributed.all_gather(parts, value.contiguous())
    dim = next((dim for dim, size in enumerate(shape) if size != value.shape[dim]), None)
    return value if dim is None else torch.cat(parts[:2], dim)


def train(engine: Any, step: int) -> float:
    loss = engine(*batch(step))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def held(engine: Any) -> dict[str, Any]:
    return {
        "state": {"buffer seen": engine.module.seen.clone()} | held_values(engine),
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "scale": float(engine.optimizer.loss_scale) if hasattr(engine.optimizer, "loss_scale") else 1.0,
    }


def held_values(engine: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and moments that the ranks with the same slices have."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # done too early for every group but the first
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            state[name] = safe_get_full_fp32_param(param).clone()
            for key in MOMENTS:
                state[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
        else:
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                state[name] = param.detach().clone()
    return state


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Of the bits of each tensor in fp32."""
    return {name: xxhash.xxh3_64_hexdigest(tensor.cpu().float().contiguous().numpy()) for name, tensor in state.items()}


def main() -> None:
    is_split = sys.argv[1:] == ["split"]
    names, stem = list(SPLIT_RUNS if is_split else RUNS), "split" if is_split else "deepspeed"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if is_split:
            run_ranks(4, run_split, root, names, timeout=900)
        else:
            run_ranks(2, run, root, names, timeout=900)
        found = {name: torch.load(root / f"{name}.pt") for name in names}
        for values in found.values():
            values["state"] = digests(values["state"])
        (DATA / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
        for script in root.glob("*/zero_to_*.py"):
            script.unlink()
        with tarfile.open(DATA / f"{stem}.tar.xz", "w:xz", preset=9) as archive:
            for name in names:
                archive.add(root / name, name, filter=without_owner)


def without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


if __name__ == "__main__":
    sys.exit(main())
