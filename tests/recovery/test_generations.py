"""At every moment of a snapshot, any one host may be lost."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from zeroengine.checkpoint.manifest import Manifest
from zeroengine.recovery.generations import (
    HeldSnapshot,
    HostRanks,
    describe_damage,
    newest_first,
    newest_whole,
    removable,
)

Hosts = list[dict[str, HeldSnapshot]]


def hosts_of(count: int) -> HostRanks:
    """So many hosts of two ranks."""
    return HostRanks([[2 * host, 2 * host + 1] for host in range(count)], 0)


def parts(count: int, copies: int, sequence: int) -> list[HeldSnapshot]:
    """What each host has of a snapshot: the files of its ranks, those of the hosts that it keeps copies for."""
    ranks = hosts_of(count)
    files = {host: {f"__{rank}_0.distcp" for rank in own} for host, own in enumerate(ranks.ranks)}
    names = [".metadata", *sorted(name for own in files.values() for name in own)]
    manifest = Manifest.model_construct(
        sequence=sequence, saved_at="2026-01-01T00:00:00+00:00", step=10 * sequence, files=dict.fromkeys(names)
    )
    held = {host: {".metadata", *own} for host, own in files.items()}
    for host, own in files.items():
        for target in ranks.targets(host, copies):
            held[target] |= own
    return [HeldSnapshot(manifest, frozenset(held[host])) for host in range(count)]


def moments(random_: random.Random, count: int, copies: int) -> Iterator[tuple[Hosts, int]]:
    """Yield what hosts have while snapshots are taken, some of which fail, and the last number that succeeded."""
    hosts: Hosts = [{"1": part} for part in parts(count, copies, 1)]
    done = 1
    for sequence in range(2, 8):
        before = [set(host) for host in hosts]
        outdated = removable(hosts)
        for host in random_.sample(range(count), count):
            for tag in outdated & hosts[host].keys():
                del hosts[host][tag]
                yield hosts, done
        new = parts(count, copies, sequence)
        failing = random_.choice([None, None, *range(count)])
        for host in random_.sample(range(count), count):
            if host != failing:
                hosts[host][str(sequence)] = new[host]
                yield hosts, done
        if failing is None:
            done = sequence
            for host in random_.sample(range(count), count):
                for tag in before[host] & hosts[host].keys():
                    del hosts[host][tag]
                    yield hosts, done


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("count", "copies"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_without_any_one_host_a_snapshot_is_whole(count: int, copies: int, seed: int) -> None:
    for hosts, done in moments(random.Random(seed), count, copies):
        for lost in range(count):
            left = hosts[:lost] + hosts[lost + 1 :]
            tag = newest_whole(left)
            assert tag is not None, (lost, [sorted(host) for host in hosts])
            assert int(tag) >= done
        assert len(newest_first(hosts)) <= 3


def test_a_host_that_is_new_does_not_keep_old_snapshots_alive() -> None:
    both = [{"1": old, "2": new} for old, new in zip(parts(2, 1, 1), parts(2, 1, 2), strict=True)]
    assert removable([both[0], {}]) == {"1"}


def test_a_snapshot_that_lacks_a_file_is_passed_over() -> None:
    hosts = [{"1": old, "2": new} for old, new in zip(parts(2, 0, 1), parts(2, 0, 2), strict=True)]
    del hosts[1]["2"]
    assert newest_whole(hosts) == "1" and list(newest_first(hosts)) == ["2", "1"]
    assert newest_whole(hosts[1:]) is None and newest_whole([]) is None


def test_what_is_damaged_is_told_of_the_snapshot_that_is_taken_and_of_newer_ones() -> None:
    hosts = [{str(n): parts(2, 0, n)[host] for n in (1, 2, 3)} for host in range(2)]
    del hosts[1]["3"]
    damaged = [("1", "older"), ("2", "taken"), ("3", "newer"), ("4", "without a manifest")]
    texts = describe_damage(hosts, newest_whole(hosts), damaged)
    assert texts == ["that of step 30 is not whole", "taken", "newer", "without a manifest", "that of step 20 is whole"]
    assert describe_damage(hosts, "3", []) == describe_damage([], None, []) == []
    assert describe_damage([], None, damaged[3:]) == ["without a manifest", "none is whole"]


def test_copies_go_to_the_hosts_that_follow() -> None:
    ranks = hosts_of(3)
    assert [ranks.targets(host, 1) for host in range(3)] == [[1], [2], [0]]
    assert ranks.targets(2, 2) == [0, 1]
