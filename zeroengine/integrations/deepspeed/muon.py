"""``deepspeed.runtime.zero.muon``: DeepSpeed's optimizers with Muon, made of zeroengine's."""

from __future__ import annotations

from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed.ops import FusedAdam
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon
from zeroengine.optim.muon_groups import ADAM_LR, MUON_LR


def make_muon(
    params: Any, lr: float = MUON_LR, weight_decay: float = 0, momentum: float = 0.95, ns_method: str = "gram"
) -> Muon:
    """Return Muon over matrices, with DeepSpeed's arguments: its ``Muon`` and ``SingleDeviceMuon``."""
    return Muon(params, lr, weight_decay, momentum, ns_method=ns_method)


class MuonWithAuxAdam(MixedOptimizer):
    """Muon for the groups with ``use_muon=True``, and AdamW for those with ``use_muon=False``.

    Args:
        param_groups: The groups. Those of Muon may have the keys of ``make_muon``; the others lr, betas, eps and
            weight_decay.
        adam_optimizer: Not used: Adam is zeroengine's.
        adam_optimizer_kwargs: Not used.
        adam_w_mode: False: Adam with L2 decay in the place of AdamW.
    """

    def __init__(
        self, param_groups: Any, adam_optimizer: Any = None, adam_optimizer_kwargs: Any = None, adam_w_mode: bool = True
    ) -> None:
        groups = list(param_groups)
        if not all(isinstance(group, dict) and isinstance(group.get("use_muon"), bool) for group in groups):
            raise ZeroEngineError('MuonWithAuxAdam: every group is a dict with "use_muon": True or False')
        matrices = [group for group in groups if group["use_muon"]]
        others = [group for group in groups if not group["use_muon"]]
        members: list[torch.optim.Optimizer] = [make_muon(matrices)] if matrices else []
        if others:
            members.append(FusedAdam(others, lr=ADAM_LR, betas=(0.9, 0.95), eps=1e-10, adam_w_mode=adam_w_mode))
        super().__init__(members)
        # Schedules may list rates in the order of the caller's groups.
        self.param_groups = groups
