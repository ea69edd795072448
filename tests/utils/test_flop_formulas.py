from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from zeroengine.monitor.flops import ForwardFlops


def test_attention_counts_both_products() -> None:
    query, key, value = torch.randn(3, 2, 4, 16, 8).unbind()
    with ForwardFlops() as counted:
        F.scaled_dot_product_attention(query, key, value)
    assert counted.total == 2 * (2 * 2 * 4 * 16 * 16 * 8)


@pytest.mark.parametrize("num_experts", [1, 3])
def test_each_row_of_a_grouped_product_meets_one_expert(num_experts: int) -> None:
    rows = torch.randn(12, 16, dtype=torch.bfloat16)
    experts = torch.randn(num_experts, 16, 32, dtype=torch.bfloat16)
    ends = torch.linspace(12 // num_experts, 12, num_experts).to(torch.int32)
    with ForwardFlops() as counted:
        torch._grouped_mm(rows, experts, offs=ends)
    assert counted.total == 2 * 12 * 16 * 32
