"""Machines with common GPUs, by NVIDIA's data sheets.

Rates are what a training run is assumed to achieve: a fraction of each peak. ``zero-plan --measure`` replaces the
assumption by measurements.
"""

from __future__ import annotations

from zeroengine.plan.seconds.machine import Machine, Rates
from zeroengine.utils.gpu_data_sheets import DATA_SHEETS, DataSheet

# Fractions of the peaks that eager PyTorch is assumed to achieve. On an H200 a bf16 product of 8192 x 8192 matrices ran
# at 0.79 of the peak and a copy at 0.90; a model's products are smaller.
MATMUL_FRACTION, MEMORY_FRACTION, LINK_FRACTION, HOST_LINK_FRACTION = 0.65, 0.9, 0.75, 0.8
# The seconds of a small collective, and of the launch of one operation by the host.
LATENCY, DISPATCH = 20e-6, 6e-6
# Assumed of the hosts and disks of every preset, in bytes per second.
HOST_MEMORY, DISK_READ, DISK_WRITE = 150e9, 6e9, 3e9


def _preset(name: str, sheet: DataSheet) -> Machine:
    gb = 1e9
    achieved = {dtype: tflops * 1e12 * MATMUL_FRACTION for dtype, tflops in sheet.tflops.items()}
    rates = Rates(
        matmul=achieved,
        memory=sheet.memory * gb * MEMORY_FRACTION,
        elementwise=dict.fromkeys(sheet.tflops, sheet.memory * gb * MEMORY_FRACTION),
        host_memory=HOST_MEMORY,
        link=sheet.link * gb * LINK_FRACTION,
        reduce_link=sheet.link * gb * LINK_FRACTION,
        node_link=sheet.network * gb * LINK_FRACTION,
        latency=LATENCY,
        host_link=sheet.pcie * gb * HOST_LINK_FRACTION,
        disk_read=DISK_READ,
        disk_write=DISK_WRITE,
        dispatch=DISPATCH,
    )
    of_peak = f"{sheet.sheet}: the peak"
    sources = {
        "device_bytes": "what CUDA reports, as in torch's out-of-memory messages",
        "host_bytes disk_bytes ranks_per_node": sheet.node,
        "matmul attention": f"{of_peak}, dense, x {MATMUL_FRACTION} (assumed)",
        "memory elementwise": f"{of_peak} x {MEMORY_FRACTION} (assumed)",
        "link reduce_link": f"{of_peak} of one direction of NVLink, or else PCIe, x {LINK_FRACTION} (assumed)",
        "node_link": f"{sheet.node}: all network ports x {LINK_FRACTION} (assumed)",
        "host_link": f"{of_peak} of one direction of PCIe x {HOST_LINK_FRACTION} (assumed)",
        "host_memory disk_read disk_write disk_both latency dispatch new_memory": (
            "assumed; `zero-plan --measure` measures them"
        ),
    }
    return Machine(
        name=name,
        device="cuda",
        nodes=1,
        ranks_per_node=sheet.gpus,
        device_bytes=int(sheet.gib * 2**30),
        host_bytes=int(sheet.host_gb * gb),
        disk_bytes=int(sheet.disk_tb * 1e12),
        rates=rates,
        sources=sources,
    )


PRESETS: dict[str, Machine] = {name: _preset(name, sheet) for name, sheet in DATA_SHEETS.items()}
