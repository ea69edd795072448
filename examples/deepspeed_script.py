"""A DeepSpeed script that runs unchanged under DeepSpeed and under zeroengine.

    deepspeed examples/deepspeed_script.py --deepspeed_config ds.json                   under DeepSpeed
    zero-launch --as-deepspeed examples/deepspeed_script.py --deepspeed_config ds.json  under zeroengine
    zero-launch examples/deepspeed_script.py --deepspeed_config ds.json                 under zeroengine as well

The last line needs no option, because the import below takes zeroengine's names where DeepSpeed is not installed. The
script trains a small language model on its own source, saves checkpoints, and continues from the newest one.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

try:
    import deepspeed
except ImportError:
    import zeroengine.integrations.deepspeed as deepspeed

DEFAULTS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3},
}


class LanguageModel(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1] - 1
        hidden = self.embedding(tokens[:, :-1]) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--save")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = None if args.deepspeed_config else DEFAULTS
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config or DEFAULTS):
        model = LanguageModel(args.width, layers=2, length=32)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=config)

    if args.save:
        path, state = engine.load_checkpoint(args.save)
        if path is not None:
            print(f"continues from {path} with {state}")
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rank, losses = deepspeed.comm.get_rank(), []
    while engine.global_steps < args.steps:
        generator = torch.Generator().manual_seed(engine.micro_steps * deepspeed.comm.get_world_size() + rank)
        starts = torch.randint(len(text) - 32, (engine.train_micro_batch_size_per_gpu(),), generator=generator)
        loss = engine(torch.stack([text[start : start + 32] for start in starts]).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if args.save:
        engine.save_checkpoint(args.save, client_state={"last_loss": losses[-1] if losses else None})
    with deepspeed.zero.GatheredParameters(engine.module.head.bias):
        norm = engine.module.head.bias.float().norm().item()
    if rank == 0:
        print(json.dumps({"steps": engine.global_steps, "losses": losses, "lr": engine.get_lr(), "bias_norm": norm}))


if __name__ == "__main__":
    main()
