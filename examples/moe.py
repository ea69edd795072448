"""Trains a mixture of experts, a small Mixtral of transformers, on the standard library's source files.

    zero-launch --nproc 2 examples/moe.py --stage 3
    zero-launch --nproc 2 examples/moe.py --stage 3 --expert-ranks 2

Each token is computed by 2 of the experts of a block, and the ranks choose different ones. A block is one unit, which
every rank gathers as a whole and reduces at the same place, whatever the routers choose. With `--expert-ranks` each
rank has some of the experts instead, and the ranks send tokens to one another. The loss of the router keeps the experts
equally busy. With `--config FILE` of zero-launch, `--stage` is ignored.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from train_lm import VOCABULARY, draw, read_text
from transformers import MixtralConfig, MixtralForCausalLM

import zeroengine


def make_model(options: argparse.Namespace) -> MixtralForCausalLM:
    """Return a Mixtral with random weights, built without memory: each rank makes only its part of them."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=options.experts,
        num_experts_per_tok=2,
        max_position_embeddings=options.context,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        use_cache=False,
    )
    torch.manual_seed(options.seed)
    with zeroengine.meta_init():
        return MixtralForCausalLM(config)


def expert_shares(router_logits: tuple[torch.Tensor, ...], num_experts: int) -> torch.Tensor:
    """Return the share of the tokens of this batch that each expert computes, over all blocks.

    Args:
        router_logits: For each block, (tokens, experts).
        num_experts: The number of experts of a block.

    Returns:
        (experts,), which add up to 1.
    """
    chosen = torch.cat([logits.topk(2, dim=-1).indices.flatten() for logits in router_logits])
    return torch.bincount(chosen, minlength=num_experts) / len(chosen)


def main() -> None:
    """Train, and print the loss and how evenly the experts are used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-ranks", type=int, default=1, help="ranks that hold all experts together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    config = {
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": options.batch,
        "expert_parallel": {"enabled": options.expert_ranks > 1, "autoep_size": options.expert_ranks},
    }
    engine = zeroengine.initialize(make_model(options), config=None if "ZEROENGINE_CONFIG" in os.environ else config)
    text, _ = read_text(None, options.context)
    if engine.rank == 0:
        experts = sum(p.numel() for name, p in engine.module.named_parameters() if "experts" in name)
        total = sum(p.numel() for p in engine.module.parameters())
        print(f"{total:,} parameters, {experts:,} of them in experts, at stage {engine.config.zero_optimization.stage}")
    every = max(1, options.steps // 10)
    losses = torch.zeros((), device=engine.device)
    shares = torch.zeros(options.experts, device=engine.device)
    for step in range(1, options.steps + 1):
        seed = (options.seed * 10**9 + step) * engine.world_size + engine.rank
        ids, _ = draw(text, options.batch, options.context, seed)
        outputs = engine(input_ids=ids, labels=ids)
        engine.backward(outputs.loss)
        engine.step()
        # What the experts were trained for, beside the router's own loss.
        losses += (outputs.loss - engine.module.router_aux_loss_coef * outputs.aux_loss).detach()
        shares += expert_shares(outputs.router_logits, options.experts)
        if step % every == 0:
            for value in (losses, shares):
                dist.all_reduce(value)
                value /= every * engine.world_size
            if engine.rank == 0:
                used = f"experts compute {shares.min():.1%} to {shares.max():.1%} of the tokens"
                print(f"step {step}/{options.steps}  loss {losses.item():.3f} nats  {used}", flush=True)
            losses.zero_()
            shares.zero_()
    if engine.rank == 0:
        print(engine.memory())
    engine.close()


if __name__ == "__main__":
    main()
