"""What NVIDIA's data sheets say of common GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class DataSheet(NamedTuple):
    """The figures of one GPU and of the server that it is common in.

    Rates are the peaks: dense TFLOP/s without sparsity, with fp32 accumulation, and GB/s of one direction of a link.
    """

    sheet: str  # the data sheet of the GPU
    gib: float  # that CUDA reports, as in torch's out-of-memory messages ("has a total capacity of")
    tflops: Mapping[str, float]  # fp32 is that of the ordinary cores, because torch leaves TF32 off for products
    memory: float  # GB/s
    link: float  # to the other GPUs of the server: NVLink, else PCIe
    pcie: float
    node: str  # the server
    gpus: int  # in the server
    network: float  # GB/s of one server
    host_gb: float
    disk_tb: float


_H100 = {"fp32": 67.0, "bf16": 989.4, "fp16": 989.4}
_A100 = {"fp32": 19.5, "bf16": 312.0, "fp16": 312.0}
_DGX_H100 = "NVIDIA DGX H100 data sheet"
_PC, _SERVER = "assumed: a workstation with one GPU", "assumed: a server with 25 Gbit/s Ethernet"

DATA_SHEETS = {
    "v100-32gb": DataSheet(
        "NVIDIA V100 data sheet (SXM2)",
        *(31.73, {"fp32": 15.7, "bf16": 15.7, "fp16": 125.0}, 900, 150, 16),
        *("NVIDIA DGX-1 with V100 data sheet", 8, 50, 512, 7.68),
    ),
    "a100-40gb": DataSheet(
        "NVIDIA A100 data sheet (40 GB SXM)",
        *(39.39, _A100, 1555, 300, 32, "NVIDIA DGX A100 320GB data sheet", 8, 200, 1000, 15),
    ),
    "a100-80gb": DataSheet(
        "NVIDIA A100 data sheet (80 GB SXM)",
        *(79.15, _A100, 2039, 300, 32, "NVIDIA DGX A100 640GB data sheet", 8, 200, 2000, 30),
    ),
    "h100-80gb": DataSheet("NVIDIA H100 data sheet (SXM)", 79.15, _H100, 3350, 450, 64, _DGX_H100, 8, 400, 2000, 30.72),
    "h200": DataSheet(
        "NVIDIA H200 data sheet (SXM)",
        *(139.72, _H100, 4800, 450, 64, "NVIDIA DGX H200 data sheet", 8, 400, 2000, 30.72),
    ),
    "b200": DataSheet(
        "NVIDIA HGX B200 data sheet",
        *(178.35, {"fp32": 75.0, "bf16": 2250.0, "fp16": 2250.0}, 8000, 900, 64),
        *("NVIDIA DGX B200 data sheet", 8, 400, 2000, 30.72),
    ),
    "l40s": DataSheet(
        "NVIDIA L40S data sheet",
        *(44.34, {"fp32": 91.6, "bf16": 362.0, "fp16": 362.0}, 864, 32, 32, _SERVER, 8, 3.125, 1000, 7.68),
    ),
    "l4": DataSheet(
        "NVIDIA L4 data sheet",
        *(22.03, {"fp32": 30.3, "bf16": 121.0, "fp16": 121.0}, 300, 32, 32, _SERVER, 1, 3.125, 64, 1),
    ),
    "a10": DataSheet(
        "NVIDIA A10 data sheet",
        *(22.05, {"fp32": 31.2, "bf16": 125.0, "fp16": 125.0}, 600, 32, 32, _SERVER, 1, 3.125, 128, 1),
    ),
    "t4": DataSheet(
        "NVIDIA T4 data sheet",
        *(14.75, {"fp32": 8.1, "bf16": 8.1, "fp16": 65.0}, 320, 16, 16, _SERVER, 1, 3.125, 64, 1),
    ),
    "rtx-a6000": DataSheet(
        "NVIDIA RTX A6000 data sheet",
        *(47.53, {"fp32": 38.7, "bf16": 154.8, "fp16": 154.8}, 768, 32, 32, _PC, 1, 1.25, 128, 2),
    ),
    "rtx-3090": DataSheet(
        "NVIDIA GA102 architecture whitepaper",
        *(23.69, {"fp32": 35.6, "bf16": 71.0, "fp16": 71.0}, 936, 32, 32, _PC, 1, 1.25, 64, 2),
    ),
    "rtx-4090": DataSheet(
        "NVIDIA Ada GPU architecture whitepaper",
        *(23.64, {"fp32": 82.6, "bf16": 165.2, "fp16": 165.2}, 1008, 32, 32, _PC, 1, 1.25, 64, 2),
    ),
    "rtx-5090": DataSheet(
        "NVIDIA RTX Blackwell GPU architecture whitepaper",
        *(31.37, {"fp32": 104.8, "bf16": 209.5, "fp16": 209.5}, 1792, 64, 64, _PC, 1, 1.25, 96, 2),
    ),
}


def data_sheets_of_gpu(gpu: str) -> list[str]:
    """Return the names of the data sheets of a GPU, which differ in the size of the memory; none: it is unknown.

    Args:
        gpu: The name that CUDA reports, such as "NVIDIA H100 80GB HBM3".
    """
    words = words_of_gpu(gpu)
    return [name for name in DATA_SHEETS if {word for word in name.split("-") if not word.endswith("gb")} <= words]


def words_of_gpu(gpu: str) -> set[str]:
    """Return the words of a GPU's name in lower case."""
    return set(re.split(r"[^a-z0-9]+", gpu.lower()))
