"""Say for each parameter what updates it and how precise its moments are, which decides how the model is cut."""

from __future__ import annotations

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.ops import MOMENT_BLOCK
from zeroengine.optim.fused_rules import fused_rule_of
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.optim.muon import Muon
from zeroengine.partition.cut import Algorithm

# Parameters with fewer elements keep moments in fp32 where others have 8 bits, as in bitsandbytes.
SMALL_NUMEL = 4096


def algorithms_of(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> dict[nn.Parameter, Algorithm]:
    """Return the algorithm of each parameter of an optimizer.

    Moments of 8 bits are for large parameters. Small ones would save nothing, and in embeddings the gradients of
    neighbors differ by orders of magnitude (arXiv 2110.02861, section 2.3). Both are decided on whole parameters, so
    the result is the same on any number of ranks.

    Args:
        optimizer: The optimizer.
        model: The model.
        config: The resolved configuration.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {module.weight for module in model.modules() if isinstance(module, kinds)}
    dtype = config.state_dtype
    algorithms: dict[nn.Parameter, Algorithm] = {}
    for member in members_of(optimizer):
        name, rule = type(member).__name__, fused_rule_of(member)
        num_moments = len(rule.moments) if rule is not None else 1 if isinstance(member, Muon) else 2
        wide = Algorithm(name, num_moments, torch.float32 if rule is None or dtype is torch.uint8 else dtype)
        narrow = Algorithm(name, num_moments, torch.uint8, MOMENT_BLOCK)
        has_narrow = dtype is torch.uint8 and rule is not None and num_moments > 0
        for group in member.param_groups:
            for param in group["params"]:
                is_wide = not has_narrow or param.numel() < SMALL_NUMEL or param in embeddings
                algorithms[param] = wide if is_wide else narrow
    return algorithms
