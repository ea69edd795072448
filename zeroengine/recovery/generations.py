"""Which hosts keep copies for which, and which snapshot is whole over the hosts that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from zeroengine.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class HeldSnapshot:
    """A snapshot as far as one host has it.

    Attributes:
        manifest: Its manifest.
        files: The names of those of its files that the host has.
    """

    manifest: Manifest
    files: frozenset[str]


# The snapshots of each host, by tag.
Holdings = Sequence[Mapping[str, HeldSnapshot]]


@dataclass(frozen=True)
class HostRanks:
    """The ranks of each host, and where this rank is among them.

    Attributes:
        ranks: The ranks of each host, ascending. Hosts are in the order of their first ranks.
        rank: This rank.
    """

    ranks: Sequence[Sequence[int]]
    rank: int

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return next(host for host, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def local(self) -> int:
        """This rank's number within its host. The first one keeps the host's folder."""
        return self.ranks[self.host].index(self.rank)

    def targets(self, host: int, copies: int) -> list[int]:
        """Return the hosts that keep copies for a host: those that follow it in the ring."""
        return [(host + distance) % len(self.ranks) for distance in range(1, copies + 1)]

    def holdings(self, rows: Sequence[Mapping[str, HeldSnapshot]]) -> Holdings:
        """Return what each host has, from what each rank has found of it."""
        hosts: list[dict[str, HeldSnapshot]] = [{} for _ in self.ranks]
        for host, ranks in zip(hosts, self.ranks, strict=True):
            for tag, held in (item for rank in ranks for item in rows[rank].items()):
                files = host[tag].files if tag in host else frozenset()
                host[tag] = HeldSnapshot(held.manifest, held.files | files)
        return hosts


def newest_first(hosts: Holdings) -> dict[str, Manifest]:
    """Return the manifests of all snapshots by tag, the newest first."""
    manifests = {tag: held.manifest for host in hosts for tag, held in host.items()}
    # Hosts that were apart may have counted to the same number.
    return dict(sorted(manifests.items(), key=lambda item: (item[1].sequence, item[1].saved_at), reverse=True))


def is_whole(hosts: Holdings, tag: str) -> bool:
    """Return whether each file of a snapshot is on some host."""
    parts = [host[tag] for host in hosts if tag in host]
    return bool(parts) and frozenset().union(*(held.files for held in parts)) >= parts[0].manifest.files.keys()


def newest_whole(hosts: Holdings) -> str | None:
    """Return the tag of the newest snapshot that is whole; None where there is none."""
    return next((tag for tag in newest_first(hosts) if is_whole(hosts, tag)), None)


def describe_damage(hosts: Holdings, taken: str | None, damaged: Sequence[tuple[str, str]]) -> list[str]:
    """Return what is wrong with the snapshot that is taken, if there is one, and with each newer one.

    Args:
        hosts: What each host has.
        taken: The tag of the newest snapshot that is whole.
        damaged: A tag and a sentence for each file that is not as it should be on some host.
    """
    steps = {tag: manifest.step for tag, manifest in newest_first(hosts).items()}
    newer = list(takewhile(lambda tag: tag != taken, steps))
    # Where no host can read a manifest, nobody knows whether the snapshot was newer.
    texts = [f"that of step {steps[tag]} is not whole" for tag in newer]
    texts += [text for tag, text in damaged if tag in newer or tag == taken or tag not in steps]
    return [*texts, f"that of step {steps[taken]} is whole" if taken else "none is whole"] if texts else []


def removable(hosts: Holdings) -> set[str]:
    """Return the tags of snapshots that are not needed, whichever host is lost.

    Needed are the newest that is whole, and the newest of those that every host has which has any.
    """
    tags = newest_first(hosts)
    whole = [tag for tag in tags if is_whole(hosts, tag)]
    everywhere = [tag for tag in whole if all(tag in host for host in hosts if host)]
    return tags.keys() - set([whole[0], everywhere[0]] if everywhere else whole)
