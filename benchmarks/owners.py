"""Compares two ways in which the gradients of matrices reach the ranks that update them, and the values come back.

    shards    reduce-scatter to equal shards, all-to-all to the owners and back in bf16, all-gather: as zeroengine does
    owners    sums land at the owners of whole matrices, which send the updated matrices to all ranks

Both move the matrices of a transformer, block by block, without computing anything but the sums.

    python benchmarks/owners.py --ranks 4 --transport gloo --layers 12 --width 768 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Slices, Transport
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transports.choose import open_transport
from zeroengine.optim.muon import update_cost
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.owners import ExchangePlan, Matrix, assign_owners, matrices_of, rounds_of


class Moves:
    """The two ways, on one rank."""

    def __init__(self, transport: Transport, layers: int, width: int) -> None:
        self.transport, world = transport, transport.world_size
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        degrees = Degrees(world, world, world)
        align = max(transport.shard_align_bytes // 4, 1)
        named = [(str(index), shape) for index, shape in enumerate(shapes)]
        self.layout = FlatLayout.build("block", named, degrees, world, align)
        self.units = [matrices_of(self.layout, unit, [1] * len(shapes)) for unit in range(layers)]
        self.full = [transport.empty(self.layout.numel, torch.float32).fill_(1) for _ in range(layers)]
        shard = self.layout.numel // world
        self.shards = [transport.empty(shard, torch.float32) for _ in range(layers)]
        self.rounds = rounds_of(self.units, world)
        owners = assign_owners([[update_cost(m.rows, m.columns) for m in r] for r in self.rounds], world)
        numbers = range(world)
        self.plans = [
            ExchangePlan.build(matrices, of_round, [shard] * layers, numbers, transport.rank)
            for matrices, of_round in zip(self.rounds, owners, strict=True)
        ]
        self.memory = {
            name: transport.empty(max(max(getattr(plan, name) for plan in self.plans), 1), torch.bfloat16)
            for name in ("num_sent", "num_received")
        }
        flat: dict[Matrix, int] = {}
        for matrices, of_round in zip(self.rounds, owners, strict=True):
            flat |= zip(matrices, of_round, strict=True)
        # For each unit, the elements that each rank owns, and the unit's values in the order of their owners.
        self.owned = [[sum(m.numel for m in unit if flat[m] == rank) for rank in range(world)] for unit in self.units]
        self.sent = transport.empty(sum(m.numel for m in self.units[0]), torch.float32).fill_(1)
        most = max(max(sizes) for sizes in self.owned)
        self.arrived = torch.empty(world * most)
        self.own = transport.empty(most, torch.float32)
        # What owners send is the same for all, and all-to-all wants a copy for each.
        self.copies = transport.empty(world * most, torch.float32).fill_(1)
        self.received = {"shards": 0, "owners": 0}
        self.most_in_unit = {"shards": 0, "owners": 0}

    def count(self, way: str, numel: int, size: int = 4) -> None:
        self.received[way] += numel * size
        self.most_in_unit[way] = max(self.most_in_unit[way], numel * size)

    def shards_way(self) -> None:
        transport, world = self.transport, self.transport.world_size
        works = [
            transport.reduce.reduce_scatter(shard, full, f"unit {i}")
            for i, (shard, full) in enumerate(zip(self.shards, self.full, strict=True))
        ]
        for work in works:
            work.wait_host()
            self.count("shards", self.layout.numel * (world - 1) // world)
        for number, plan in enumerate(self.plans):
            sent, received = self.memory["num_sent"][: plan.num_sent], self.memory["num_received"][: plan.num_received]
            back = tuple(zip(*plan.sizes, strict=True))
            transport.gather.all_to_all(received, sent, f"to {number}", Slices(sizes=plan.sizes)).wait_host()
            transport.gather.all_to_all(sent, received, f"back {number}", Slices(sizes=back)).wait_host()
            own = plan.sizes[transport.rank][transport.rank]
            self.received["shards"] += 2 * (plan.num_received - own + plan.num_sent - own)
        for i, (shard, full) in enumerate(zip(self.shards, self.full, strict=True)):
            transport.gather.all_gather(full, shard, f"unit {i}").wait_host()
            self.count("shards", self.layout.numel * (world - 1) // world)
        transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "end")

    def owners_way(self) -> None:
        transport, world, rank = self.transport, self.transport.world_size, self.transport.rank
        for i, owned in enumerate(self.owned):
            sizes = tuple(tuple(owned) for _ in range(world))
            arrived = self.arrived[: world * owned[rank]]
            transport.reduce.all_to_all(arrived, self.sent, f"unit {i}", Slices(sizes=sizes)).wait_host()
            if owned[rank]:
                sum_in_rank_order(self.own[: owned[rank]], list(arrived.chunk(world)), accumulate=False)
            self.count("owners", owned[rank] * (world - 1))
        for i, owned in enumerate(self.owned):
            sizes = tuple((numel,) * world for numel in owned)
            sent = self.copies[: world * owned[rank]]
            transport.gather.all_to_all(self.full[i][: sum(owned)], sent, f"unit {i}", Slices(sizes=sizes)).wait_host()
            self.count("owners", sum(owned) - owned[rank])
        transport.all_reduce_scalars(torch.zeros(1, dtype=torch.float64), "end")


def timed(run: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = open_transport(Group(dist.group.WORLD, torch.device("cpu")), args.transport, 120)
    moves = Moves(transport, args.layers, args.width)
    ways = {"shards": moves.shards_way, "owners": moves.owners_way}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):
        for way, run in ways.items():
            moves.received[way] = 0
            elapsed = timed(run)
            if number:
                seconds[way].append(elapsed)
    found: list[object] = [None] * transport.world_size
    dist.all_gather_object(found, (moves.received, moves.most_in_unit))
    if transport.rank == 0:
        for way, values in seconds.items():
            received = [of_rank[0][way] for of_rank in found]  # type: ignore[index]
            in_unit = max(of_rank[1][way] for of_rank in found)  # type: ignore[index]
            row = {"way": way, "ms": round(statistics.median(values) * 1000, 1)}
            row |= {"received_mib": round(sum(received) / len(received) / 2**20, 1)}
            row |= {"busiest_mib": round(max(received) / 2**20, 1), "most_in_a_unit_mib": round(in_unit / 2**20, 2)}
            print(json.dumps(row), flush=True)
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", choices=["shm", "gloo"], default="gloo")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    subprocess.run([*launch, __file__, *sys.argv[1:]], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
