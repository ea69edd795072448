"""The peak of a GPU is found by the name that CUDA reports, and only where the data sheet is that GPU's."""

from __future__ import annotations

import pytest

from zeroengine.engine.run_description import peak_flops_by_name


@pytest.mark.parametrize(
    "gpu, dtype, tflops",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA L40S", "fp16", 362.0),
        ("NVIDIA L4", "fp16", 121.0),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4060", "bf16", None),
    ],
)
def test_a_gpu_has_the_peak_of_its_data_sheet(gpu: str, dtype: str, tflops: float | None) -> None:
    assert peak_flops_by_name(gpu, dtype) == (None if tflops is None else tflops * 1e12)
