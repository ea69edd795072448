"""Take snapshots of the states into the memory of hosts, beside training, and find the one to resume from.

[Note: Snapshots]
A snapshot is a checkpoint: files of DCP and a manifest, in a folder of each host that lies in a file system in memory.
So it outlives the processes of the ranks. A host has the files of its own ranks and copies of those of other hosts, and
every host has the metadata and the manifest. `generations` says which snapshot is whole over the hosts that are left.

- *Taking one*: the states are copied, which is all that training waits for. A thread of each rank writes its file into
  the folder of its host and sends it to other hosts. The first rank of a host keeps the folder and serves its files.
- *Two phases*: when all files are everywhere, each host renames its directory and keeps the snapshot before. When all
  have renamed, each hides the one before, and the next one is written over its files. So at every moment one snapshot
  is whole, also without any single host.
- *The order*: rank 0 numbers snapshots, each above all that any host has. So after a return to an earlier checkpoint
  the later snapshots count.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import mmap
import os
import secrets
import shutil
import socket
import struct
import time
from collections import ChainMap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zeroengine.checkpoint.agreement import StepAgreement
from zeroengine.checkpoint.content import CheckpointContent
from zeroengine.checkpoint.dcp_metadata import METADATA, open_local
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.failures import as_checkpoint_errors, failure_reason
from zeroengine.checkpoint.manifest import FORMAT, Manifest, find_damage
from zeroengine.checkpoint.newest import FoundSnapshot, SnapshotSearch
from zeroengine.checkpoint.writer import CPU, BackgroundWriter
from zeroengine.comm.alarm_board import ranks_by_value
from zeroengine.comm.group import Group
from zeroengine.comm.watchdog import host_name
from zeroengine.config import Config
from zeroengine.disk.mounts import mount_of
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.memory.snapshot_bytes import GENERATIONS, copies_of
from zeroengine.offload.host_memory import available_memory
from zeroengine.recovery.generations import (
    HeldSnapshot,
    Holdings,
    HostRanks,
    describe_damage,
    newest_first,
    newest_whole,
    removable,
)
from zeroengine.recovery.server import BUFFER_BYTES, PeerConnection, RemoteFile, SnapshotServer
from zeroengine.utils.formats import format_byte_size
from zeroengine.utils.launcher import SNAPSHOT_FOLDER, own_address, source_address_for
from zeroengine.utils.process_finalizer import finalize
from zeroengine.utils.progress import ignore_progress

log = logging.getLogger("zeroengine")
# The file of a host's folder that holds the number of the step that the host has reached.
STEP = ".step"
# The ranks agree at most so often that a snapshot is due.
AGREEMENT_INTERVAL_S = 1.0
# The numbers of this process's engines with snapshots.
_OPEN_ENGINES: set[int] = set()


class MemorySnapshots:
    """Takes the snapshots of one engine and finds them. All ranks construct, query and close it together.

    Args:
        config: The resolved configuration, which asks for snapshots.
        group: All ranks.
        nbytes: The bytes of this rank's part of a snapshot, as planned.

    Attributes:
        unused: The tag of a snapshot of an earlier round, as long as nothing was loaded.

    Raises:
        ZeroEngineError: On every rank: there is no folder, or too little memory, or the states cannot be copied.
    """

    def __init__(self, config: Config, group: Group, nbytes: int) -> None:
        self._group = group
        path, token = _checked_folder(config, group), secrets.token_hex(16)
        address = source_address_for(os.environ.get("MASTER_ADDR") or socket.gethostname())
        self._name = host_name() or socket.gethostname()
        number = next(number for number in itertools.count(1) if number not in _OPEN_ENGINES)
        rows = group.all_gather_object(((self._name, path), address, token, nbytes, number), "to open the snapshots")
        # Engines of one process, as of a GAN, must not take the snapshots of one another.
        _OPEN_ENGINES.add(number := rows[0][4])
        path = path if number == 1 else os.path.join(path, f"engine-{number}")
        by_host = ranks_by_value({rank: row[0] for rank, row in enumerate(rows)}).values()
        self._ranks = HostRanks(list(by_host), group.rank)
        self._token = rows[0][2]
        self._folder = CheckpointFolder(path)
        self._server: SnapshotServer | None = None
        # The hidden directory of the snapshot before, which the next one writes over: taking memory takes longer than
        # filling it.
        self._reusable: Path | None = None
        self._step: mmap.mmap | None = None
        resources = contextlib.ExitStack()
        # An engine that is not closed ends these when it is deleted, or when the process exits.
        self._end = finalize(self, resources.close)
        resources.callback(_OPEN_ENGINES.discard, number)
        self._copies = _checked_copies(config, group, len(self._ranks.ranks))
        endpoints: list[tuple[str, int]] = []
        with group.collective_errors("to initialize", endpoints) as all_endpoints:
            if self._ranks.local == 0:
                self._open_folder([row[3] for row in rows])
                if len(self._ranks.ranks) > 1:
                    others = [str(row[1]) for row in rows if row[0] != rows[group.rank][0] and row[1]]
                    self._server = SnapshotServer(own_address(address, others), self._folder, self._token)
                    resources.callback(self._server.end)
                    endpoints.append(self._server.server_address[:2])  # type: ignore[arg-type]
        # The first rank of each host serves it.
        self._endpoints = [all_endpoints[ranks[0]] for ranks in self._ranks.ranks]
        self._writer = BackgroundWriter(group, "zeroengine-snapshot")
        self._every_s = float(config.snapshots.every_seconds or 0)
        self._agreement = StepAgreement(group, "agree on a snapshot", min(AGREEMENT_INTERVAL_S, self._every_s))
        self._next_time = time.monotonic() + self._every_s
        # A snapshot that is there already was taken in an earlier round, and the script may forget to load it.
        held = self._ranks.holdings(group.all_gather_object(self._holdings_here()[0], "of snapshots"))
        self.unused = next(iter(newest_first(held)), None)

    def _open_folder(self, nbytes_of_ranks: Sequence[int]) -> None:
        """Make this host's folder, and check that the snapshots fit."""
        path, ranks = self._folder.path, self._ranks
        with as_checkpoint_errors(f"snapshots.folder {path}: cannot be made a folder"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path / STEP, "a+b") as step:
                # Where memory is full, writing to a page that is not there yet would kill the process.
                os.posix_fallocate(step.fileno(), 0, 8)
                self._step = mmap.mmap(step.fileno(), 8)
        if not mount_of(path).in_memory:
            log.warning(
                "snapshots.folder %s is not in a file system in memory (tmpfs): snapshots go to a disk, and a host "
                "that is started again has them",
                path,
            )
        sizes = [sum(nbytes_of_ranks[rank] for rank in host) for host in ranks.ranks]
        kept_for = [host for host in range(len(sizes)) if ranks.host in ranks.targets(host, self._copies)]
        files = GENERATIONS * (sizes[ranks.host] + sum(sizes[host] for host in kept_for))
        # Snapshots of an earlier round are replaced.
        present = sum(entry.stat().st_blocks * 512 for entry in path.glob("*/*") if entry.is_file())
        free = shutil.disk_usage(path).free + present
        for need, size, where in (
            (files, free, path),
            (files + sizes[ranks.host], int(min(available_memory(), 2**63)) + present, "CPU memory"),
        ):
            if need > size:
                raise ZeroEngineError(
                    f"snapshots take {format_byte_size(need)} of memory on {self._name}: {GENERATIONS} of its "
                    f"{len(ranks.ranks[ranks.host])} ranks, and of those of {len(kept_for)} other hosts. In {where} "
                    f"{format_byte_size(size)} are free: use more hosts, fewer copies (snapshots.copies), a larger "
                    'file system (snapshots.folder), or write "every_seconds": null'
                )

    @property
    def copy_bytes(self) -> int:
        """The CPU memory that the copy of this rank's states takes, in bytes."""
        return self._writer.copy_bytes

    # -- taking one -------------------------------------------------------------------------------

    def end_step(self, step: int) -> bool:
        """Return whether a snapshot is due, at the end of a step; the same answer on all ranks.

        Args:
            step: The number of the step.
        """
        if self._step is not None:
            struct.pack_into("<q", self._step, 0, step)
        if self.unused is not None and self._group.rank == 0:
            log.warning(
                "the snapshot %s of an earlier round is in memory, and training begins without it: call "
                "engine.resume(directory) before the first step",
                self.unused,
            )
        self.unused = None
        is_idle = self._writer.future is None or self._writer.future.done()
        is_due = is_idle and self._group.rank == 0 and time.monotonic() >= self._next_time
        if not self._agreement.end_step(is_due):
            return False
        self._next_time = time.monotonic() + self._every_s
        return True

    def take(self, content: CheckpointContent) -> None:
        """Copy the states, and let a thread keep them in memory. A collective. A failure is one warning."""
        # Another rank's thread may end a moment later than that of rank 0.
        self._writer.wait()
        self._writer.start(partial(self._keep, self._writer.gloo_group()), content)

    def _keep(self, gloo_group: dist.ProcessGroup, content: CheckpointContent) -> None:
        """Write a snapshot, all ranks together, beside training."""
        try:
            self._write(gloo_group, content)
        except Exception as error:
            if self._group.rank == 0:
                reason = str(error) if isinstance(error, ZeroEngineError) else failure_reason(error)
                step = content.about["step"]
                log.warning("no snapshot of step %d: %s. The one before is as it was.", step, reason)

    def _write(self, gloo_group: dist.ProcessGroup, content: CheckpointContent) -> None:
        ranks, is_first = self._ranks, self._ranks.local == 0
        # No other thread uses this group, so its exchanges are apart from those of training.
        group = Group(gloo_group, CPU, range(self._group.world_size))
        # Ranks have clocks of their own, so the facts of rank 0 count.
        about = content.about if ranks.rank == 0 else {}
        own = self._holdings_here()[0], about, secrets.token_hex(4), content.nbytes
        rows = group.all_gather_object(own, "of snapshots")
        hosts = ranks.holdings([row[0] for row in rows])
        _, about, token, _ = rows[0]
        sequence = 1 + max((manifest.sequence for manifest in newest_first(hosts).values()), default=0)
        tag = f"step-{about['step']}.{sequence}-{token}"
        new_directories: list[Path] = []
        writing: Path | None = None
        try:
            with group.collective_errors("to take a snapshot", new_directories) as all_directories:
                if is_first:
                    self._folder.open()
                    # What an earlier attempt has left takes memory that this snapshot needs.
                    self._folder.remove(removable(hosts) & hosts[ranks.host].keys())
                    nbytes = sum(rows[rank][3] for rank in ranks.ranks[ranks.host])
                    writing, self._reusable = self._folder.begin(tag, nbytes, self._reusable), None
                    new_directories.append(writing)
                    if self._server is not None:
                        self._server.writing[tag] = writing
            path = all_directories[ranks.ranks[ranks.host][0]][0]
            # A file that any rank failed to write is an error of all ranks.
            files = save_files(path, content.entries, content.objects, content.aliases, gloo_group, ignore_progress)
            with group.collective_errors("to copy a snapshot", files) as all_files:
                self._send(tag, path, list(files))
            with group.collective_errors("to take a snapshot"):
                if writing is not None:
                    manifest = {"format": FORMAT, "tag": tag, "files": dict(ChainMap(*all_files)), **about}
                    # The directory may be that of an earlier job with more ranks.
                    for path in writing.iterdir():
                        if path.name not in manifest["files"]:
                            path.unlink()
                    self._folder.commit(writing, Manifest(**manifest, sequence=sequence), None)
            # The exchange above tells that every host has renamed its directory. Damaged ones go as well.
            if is_first:
                earlier = {path.name for path in self._folder.path.glob("step-*")} - {tag}
                before = next((tag for tag in newest_first(hosts) if tag in earlier), "")
                self._folder.remove(earlier - {before})
                self._reusable = self._folder.hide(before) if before else None
        finally:
            if self._server is not None:
                self._server.writing.pop(tag, None)
            # After a rename there is nothing of that name. What was renamed stays: the others may have renamed, too.
            if writing is not None:
                self._folder.abandon(writing)

    def _send(self, tag: str, path: Path, names: Sequence[str]) -> None:
        """Send this rank's files to the hosts that keep copies, and the metadata to all."""
        own, targets = self._ranks.host, self._ranks.targets(self._ranks.host, self._copies)
        for host in range(len(self._ranks.ranks)):
            sent = [name for name in names if host in targets or (name == METADATA and host != own)]
            if sent:
                with PeerConnection(self._endpoints[host][0], self._token) as connection:
                    for name in sent:
                        connection.put(tag, path / name)

    # -- finding one ------------------------------------------------------------------------------

    def find(self) -> SnapshotSearch:
        """Look for the newest snapshot whose every file has its checksum on some host. A collective."""
        self._writer.wait()
        # Whoever looks has not forgotten the snapshot, whole or not.
        self.unused = None
        reached = 0 if self._step is None else struct.unpack_from("<q", self._step)[0]
        rows = self._group.all_gather_object((*self._holdings_here(verify=True), reached), "to find a snapshot")
        hosts = self._ranks.holdings([row[0] for row in rows])
        tag = newest_whole(hosts)
        # All ranks of a host find the same damaged manifest.
        damage = describe_damage(hosts, tag, list(dict.fromkeys(item for row in rows for item in row[1])))
        newest = None
        if tag is not None:
            # The directory need not exist on this host.
            path, num_hosts = self._folder.path / tag, sum(tag in host for host in hosts)
            newest = FoundSnapshot(path, newest_first(hosts)[tag], num_hosts, partial(self._open_file, hosts))
        return SnapshotSearch(newest, damage, max(row[2] for row in rows))

    def _open_file(self, hosts: Holdings, path: Path) -> io.BufferedReader:
        """Open a file of a snapshot, on this host or on another one that has it."""
        tag, name = path.parent.name, path.name
        holders = [host for host, held in enumerate(hosts) if tag in held and name in held[tag].files]
        if self._ranks.host in holders:
            return open_local(path)
        connection = PeerConnection(self._endpoints[holders[0]][0], self._token)
        remote = RemoteFile(connection, tag, name, hosts[holders[0]][tag].manifest.files[name].bytes)
        return io.BufferedReader(remote, BUFFER_BYTES)

    def _holdings_here(self, *, verify: bool = False) -> tuple[dict[str, HeldSnapshot], list[tuple[str, str]]]:
        """Return what this host has, as far as this rank has looked: the ranks of a host share the files.

        Args:
            verify: Compare checksums rather than sizes alone.

        Returns:
            The snapshots by tag. A tag and a sentence for each file that is not as it should be on this host.
        """
        holdings: dict[str, HeldSnapshot] = {}
        ranks, damaged = self._ranks.ranks[self._ranks.host], []
        for tag in sorted(path.name for path in self._folder.path.glob("step-*")):
            try:
                manifest, path = self._folder.manifest(tag), self._folder.checkpoint(tag)
            except CheckpointError as error:
                damaged.append((tag, f"on {self._name} {error}"))
                continue
            names = sorted(manifest.files)[self._ranks.local :: len(ranks)]
            problems = {name: find_damage(path, manifest, [name], verify=verify) for name in names}
            holdings[tag] = HeldSnapshot(manifest, frozenset(name for name in names if not problems[name]))
            # Files are named after the ranks that wrote them, and a host need not have those of other hosts.
            own = {str(rank) for rank in ranks if manifest.world_size == self._group.world_size}
            for name, texts in problems.items():
                rank = name.strip("_").partition("_")[0]
                if texts and (rank in own or (path / name).exists()):
                    owner = f" (rank {rank})" if rank.isdigit() else ""
                    damaged.append((tag, f"on {self._name}{owner} {texts[0]}"))
        return holdings, damaged

    def close(self) -> None:
        """Wait for the snapshot under way, and end threads and sockets. What was taken stays in memory."""
        self._writer.wait()
        self._writer.close()
        self._agreement.close()
        if self._reusable is not None:
            self._folder.abandon(self._reusable)
        self._folder.close()
        self._end()


def _checked_folder(config: Config, group: Group) -> str:
    """Return this host's folder of snapshots.

    Raises:
        ZeroEngineError: On every rank: there is none, or snapshots cannot be taken with this configuration.
    """
    with group.collective_errors("to initialize"):
        zero, folder = config.zero_optimization, config.snapshots.folder or os.environ.get(SNAPSHOT_FOLDER)
        if not folder:
            raise ZeroEngineError(
                'snapshots.every_seconds needs a folder in memory: start the script with zero-launch, or write "folder"'
                ': "/dev/shm/my-run" in the section "snapshots"'
            )
        if config.local_steps is not None:
            raise ZeroEngineError(
                "snapshots with local_steps: replicas have states of their own between their rounds, and a snapshot "
                'holds those of one. Write "every_seconds": null and save checkpoints.'
            )
        if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
            raise ZeroEngineError(
                "snapshots with states on NVMe: these may be larger than memory, and cannot be copied into it. Write "
                '"every_seconds": null and save checkpoints.'
            )
        return os.path.abspath(folder)
    raise AssertionError


def _checked_copies(config: Config, group: Group, num_hosts: int) -> int:
    """Return the number of other hosts that keep copies of each rank's part."""
    copies, possible = copies_of(config, num_hosts), num_hosts - 1
    with group.collective_errors("to initialize"):
        if copies > possible:
            found = "all ranks are on one host" if num_hosts == 1 else f"there are {num_hosts} hosts"
            # The hosts that a later round has lost may come back.
            if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
                raise ZeroEngineError(f"snapshots.copies is {copies}, and {found}: write {possible}")
            if group.rank == 0:
                log.warning(
                    "snapshots.copies is %d, and %s: each part has %d until more are back", copies, found, possible
                )
    return min(copies, possible)
