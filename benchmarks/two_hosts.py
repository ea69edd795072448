"""Measures training on two hosts that a slow link joins: step times, and what crosses the link.

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces whose rate `tc tbf` limits in
both directions. Two ranks run on each. Each rank holds all engines, which take a step in turn, so that a change of the
machine's speed meets all of them. What crosses the link is read from the counters of the interface. These count the
headers of a packet once for up to 64 KB, whereas the limit counts them for every 1,500 bytes, 4.5 % more. *Exposed* is
the time of a step beyond that of the same local work without communication, over the bytes that left a host divided by
the rate. The local work is that of plain PyTorch, with a whole update on each rank (``floor``), and that of stage 3 on
the two ranks of each host alone (``zeroengine, one host``). *Exposed* refers to the first. A step of ``local steps`` is
the mean over a round. Needs root.

    sudo python benchmarks/two_hosts.py --rates 1000 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

RANKS_PER_HOST = 2
INTERFACE = "ze-link"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
NODE = {"parameters": "node", "gradients": "node"}
NODE_ALONE = {**NODE, "optimizer": "node"}
QUANTIZED_SUMS = {"zero_quantized_gradients": True}
QUANTIZED = QUANTIZED_SUMS | {"zero_quantized_weights": True}
Figures = dict[str, float]
# The part of the configuration that says how states are partitioned, or the argument of the engine.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "floor": ("floor", {}),
    "zeroengine, one host": ("one host", {"zero_optimization": {"stage": 3}}),
    "zeroengine, stage 3": ("zeroengine", {"zero_optimization": {"stage": 3}}),
    "zeroengine, stage 3, Gloo": ("zeroengine", {"zero_optimization": {"stage": 3}, "comm": {"transport": "gloo"}}),
    "zeroengine, node": ("zeroengine", {"zero_optimization": {"degrees": NODE_ALONE}}),
    "zeroengine, node, optimizer all": ("zeroengine", {"zero_optimization": {"degrees": {**NODE, "optimizer": "all"}}}),
    "zeroengine, stage 3, 8 bits": ("zeroengine", {"zero_optimization": {"stage": 3, **QUANTIZED}}),
    "zeroengine, node, 8 bits": ("zeroengine", {"zero_optimization": {"degrees": NODE_ALONE, **QUANTIZED_SUMS}}),
    "zeroengine, local steps 8": ("zeroengine", {"zero_optimization": {"stage": 3}, "local_steps": 8}),
    "zeroengine, hpZ": ("zeroengine", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": RANKS_PER_HOST}}),
    "FSDP2": ("fsdp2", {}),
    "FSDP2, HSDP": ("fsdp2", {"replicas": 2}),
    "DeepSpeed, stage 3": ("deepspeed", {"zero_optimization": {"stage": 3}}),
    "DeepSpeed, MiCS": ("deepspeed", {"zero_optimization": {"stage": 3, "mics_shard_size": RANKS_PER_HOST}}),
    "DeepSpeed, hpZ": ("deepspeed", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": RANKS_PER_HOST}}),
}


# -- the rig ----------------------------------------------------------------------------------------


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def joined_hosts() -> Iterator[tuple[str, str]]:
    """Yield the names of two network namespaces with a link between them."""
    hosts = (f"ze-a-{os.getpid()}", f"ze-b-{os.getpid()}")
    # ``ip netns exec`` shows these files in /etc. Without them each connection would ask a name server out of reach.
    folders = [Path("/etc/netns") / host for host in hosts]
    try:
        for host, folder in zip(hosts, folders, strict=True):
            run_ip("netns", "add", host)
            folder.mkdir(parents=True)
            names = (f"{address} {name}\n" for name, address in zip(hosts, ADDRESSES, strict=True))
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
            (folder / "resolv.conf").write_text("")
        peer = ("peer", "name", INTERFACE, "netns", hosts[1])
        run_ip("-n", hosts[0], "link", "add", "name", INTERFACE, "type", "veth", *peer)
        for host, address in zip(hosts, ADDRESSES, strict=True):
            run_ip("-n", host, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                run_ip("-n", host, "link", "set", device, "up")
        yield hosts
    finally:
        for host, folder in zip(hosts, folders, strict=True):
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def limit(hosts: tuple[str, str], megabits: int) -> None:
    """Limit what leaves each host, in 10^6 bits per second. 0: no limit."""
    for host in hosts:
        tc = ["ip", "netns", "exec", host, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", INTERFACE, "root"], capture_output=True)
        if megabits:
            shape = ["rate", f"{megabits}mbit", "burst", "256kb", "latency", "10ms"]
            subprocess.run([*tc, "add", "dev", INTERFACE, "root", "tbf", *shape], check=True)


def run(engines: Sequence[str], hosts: tuple[str, str], args: argparse.Namespace) -> dict[str, list[Figures]]:
    """Train with each engine in turn on both hosts, and return the figures of rank 0; none if an engine cannot."""
    processes = []
    turns = ["--rounds", str(args.rounds), "--steps", str(args.steps), "--size", args.size]
    turns += ["--batch", str(args.batch), "--context", str(args.context)]
    for rank in range(2 * RANKS_PER_HOST):
        host = rank // RANKS_PER_HOST
        places = {"RANK": rank, "LOCAL_RANK": rank % RANKS_PER_HOST, "WORLD_SIZE": 2 * RANKS_PER_HOST}
        places |= {"LOCAL_WORLD_SIZE": RANKS_PER_HOST, "GROUP_RANK": host, "CROSS_SIZE": 2, "CROSS_RANK": host}
        env = {**os.environ, **{name: str(value) for name, value in places.items()}}
        env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(args.port), "GLOO_SOCKET_IFNAME": INTERFACE}
        env |= {"OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1", "ZEROENGINE_HOST": hosts[host]}
        python = args.deepspeed_python if engines[0].startswith("DeepSpeed") else sys.executable
        command = ["ip", "netns", "exec", hosts[host], python, __file__, *turns, "--worker", *engines]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    args.port += 1
    deadline = time.monotonic() + args.timeout
    try:
        # A rank that fails leaves the others waiting, so all are ended with it.
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    outputs = [process.communicate() for process in processes]
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("{")]
    if not lines:
        causes = [line for _, errors in outputs for line in errors.strip().splitlines() if "Error" in line]
        print(f"{engines} do not run: {(causes or [outputs[0][1][-300:]])[0]}", file=sys.stderr, flush=True)
        return {}
    found: dict[str, list[Figures]] = json.loads(lines[-1])
    return found


# -- a rank -----------------------------------------------------------------------------------------


def sent_bytes() -> int:
    """Return the bytes that have left this host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def work(engines: Sequence[str], args: argparse.Namespace) -> None:
    """Train on this rank, the engines in turn; rank 0 prints their figures."""
    import torch
    import torch.distributed as dist
    import workload

    torch.set_num_threads(1)
    if not engines[0].startswith("DeepSpeed"):
        dist.init_process_group("gloo")
    model = workload.Transformer(*workload.SIZES[args.size], args.context)
    parameter_mb = sum(p.numel() for p in model.parameters()) * 4e-6
    steps = {engine: make_step(engine, args) for engine in engines}
    found: dict[str, list[Figures]] = {engine: [] for engine in engines}
    # The first turn warms up.
    for turn in range(args.rounds + 1):
        for engine, step in steps.items():
            # What replicas send in the last step of a round belongs to all of its steps.
            round_steps = ENGINES[engine][1].get("local_steps", 1)
            for _ in range(args.steps):
                dist.barrier()
                sent, cpu, start = sent_bytes(), time.process_time(), time.perf_counter()
                for _ in range(round_steps):
                    step()
                busy = time.process_time() - cpu
                dist.barrier()
                seconds = time.perf_counter() - start
                figures = {"step_s": seconds, "cpu_s": busy, "sent_mb": (sent_bytes() - sent) / 1e6}
                figures = {name: value / round_steps for name, value in figures.items()}
                if turn:
                    found[engine].append(figures | {"parameter_mb": parameter_mb})
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    # The engines' threads and groups need no orderly end here.
    os._exit(0)


def make_step(engine: str, args: argparse.Namespace) -> Callable[[], None]:
    """Return the function that takes a step with an engine."""
    import torch
    import torch.distributed as dist
    import workload

    name, settings = ENGINES[engine]
    torch.manual_seed(0)
    model = workload.Transformer(*workload.SIZES[args.size], args.context)
    data = workload.batches(args.size, int(os.environ["RANK"]), args.batch, args.context)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": workload.CLIP,
        "optimizer": {"type": "AdamW", "params": workload.ADAMW},
    } | settings
    if name in ("floor", "fsdp2"):
        if name == "fsdp2":
            shard(model, settings.get("replicas", 1))
        take = workload.plain_step(model, None)

        def plain() -> None:
            take(*next(data))

        return plain
    if name == "deepspeed":
        import deepspeed

        trained = start_deepspeed(deepspeed, model, config | {"steps_per_print": 10**9})
    else:
        import zeroengine

        ranks = range(dist.get_world_size())
        hosts = [list(ranks[i : i + RANKS_PER_HOST]) for i in ranks[::RANKS_PER_HOST]]
        own_host = dist.new_subgroups_by_enumeration(hosts)[0] if name == "one host" else None
        trained = zeroengine.initialize(model, config=config, process_group=own_host)

    def step() -> None:
        loss = trained(*next(data))
        trained.backward(loss)
        trained.step()

    return step


def start_deepspeed(deepspeed: Any, model: Any, config: dict[str, Any]) -> Any:
    deepspeed.init_distributed("gloo")
    if "mics_shard_size" in config["zero_optimization"]:
        with deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=config):
            pass
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def shard(model: Any, replicas: int) -> None:
    """Apply FSDP2, or with several replicas hybrid sharding."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world_size = dist.get_world_size()
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="s")
    parser.add_argument("--rates", type=int, nargs="*", default=[1000, 200], help="10^6 bits per second; 0: unlimited")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each engine, after one that is not measured")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--port", type=int, default=29400)
    parser.add_argument("--deepspeed-python", help="of an environment that has DeepSpeed; none: DeepSpeed is left out")
    parser.add_argument("--only", nargs="*", help="names of engines")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args)
    wanted = args.only or ENGINES
    own = ["floor", *(name for name in wanted if name != "floor" and not name.startswith("DeepSpeed"))]
    # Each of these may end in an error, and needs another environment.
    others = [[name] for name in wanted if name.startswith("DeepSpeed") and args.deepspeed_python]
    # The end by a signal must remove the namespaces as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with joined_hosts() as hosts:
        for rate in args.rates:
            limit(hosts, rate)
            found: dict[str, list[Figures]] = {}
            for engines in [own, *others]:
                found |= run(engines, hosts, args)
            report(rate, found)


def report(rate: int, found: dict[str, list[Figures]]) -> None:
    """Print a table of one rate. Sent bytes are given in units of the parameters' bytes, too."""
    print(f"\n{rate or 'no'} Mbit/s, {len(found['floor'])} steps of each")
    print(f"{'engine':<36}{'step s':>8}{'min':>8}{'max':>8}{'CPU s':>8}{'sent MB':>9}{'/ params':>9}{'exposed':>9}")
    floor = statistics.median(figures["step_s"] for figures in found["floor"])
    for engine, steps in found.items():
        seconds = [figures["step_s"] for figures in steps]
        sent, cpu = (statistics.median(figures[name] for figures in steps) for name in ("sent_mb", "cpu_s"))
        step = statistics.median(seconds)
        exposed = f"{(step - floor) / (sent * 8 / rate):.2f}" if rate and sent > 1 else ""
        print(
            f"{engine:<36}{step:>8.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}{cpu:>8.2f}{sent:>9.1f}"
            f"{sent / steps[0]['parameter_mb']:>9.2f}{exposed:>9}",
            flush=True,
        )


if __name__ == "__main__":
    main()
