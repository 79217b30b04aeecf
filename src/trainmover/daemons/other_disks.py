"""Disks of all machines, through their agents, as tiers of one choice.

Decides in which order they are tried, and that one that can't be asked is a tier with a reason
instead of one that is missing without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmover import controller
from trainmover.checkpoint.choice import Choice
from trainmover.checkpoint.remote_disk import Manifests, RemoteDisk
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.tiers import side_by_side
from trainmover.edges.disk_client import DiskClient
from trainmover.edges.snapshot_client import Holder
from trainmover.edges.snapshot_wire import CheckpointOnDisk
from trainmover.errors import RemoteProtocolError, TransportError
from trainmover.protocol.messages import DiskPart

SILENCE_LIMIT_S = 20.0
"""Longest wait for a byte of an agent that is asked about its disk."""


@dataclass(frozen=True, slots=True)
class _Asked:
    machine: str
    client: DiskClient | None
    found: tuple[CheckpointOnDisk, ...] | None
    """None: it has not answered; its tier will say why."""


class OtherDisks:
    """Connections to agents, for the time of one choice."""

    def __init__(self, disks: Sequence[controller.Disk], secret: bytes) -> None:
        self._disks = disks
        self._secret = secret
        self._clients: list[DiskClient] = []
        self.tiers: dict[str, RemoteDisk] = {}

    def open(self) -> dict[str, Store]:
        """Look at all of them side by side; each directory there is a tier, own names first."""
        asked = side_by_side(self._ask, self._disks)
        manifests: Manifests = {}
        tiers = [tier for one in asked for tier in _tiers(one, manifests)]
        shown = {(one.machine, _listing(one, one.machine)) for one in asked}
        for tier, found in sorted(tiers, key=lambda pair: pair[0].folder != pair[0].machine):
            # Where one host plays several machines, each agent sees the directories of all.
            is_alias = tier.folder != tier.machine and (tier.folder, found) in shown
            if not is_alias:
                self.tiers[tier.location] = tier
        return dict(self.tiers)

    def close(self) -> None:
        """End the connections."""
        for client in self._clients:
            client.close()

    def _ask(self, disk: controller.Disk) -> _Asked:
        if not disk.port:
            return _Asked(disk.machine, None, None)
        holder = Holder(
            host=disk.host, port=disk.port, secret=self._secret, limit_s=SILENCE_LIMIT_S
        )
        client = DiskClient(holder)
        self._clients.append(client)
        try:
            return _Asked(disk.machine, client, client.look())
        except (TransportError, RemoteProtocolError):
            return _Asked(disk.machine, client, None)

    def parts(self, chosen: Choice) -> tuple[DiskPart, ...]:
        """What of the choice is taken from which disk."""
        rank_of = {file.path: file.rank for file in chosen.manifest.files}
        ranks: dict[str, set[int]] = {}
        for path, tier in chosen.sources:
            if tier in self.tiers:
                ranks.setdefault(tier, set()).add(rank_of[path])
        return tuple(
            DiskPart(
                machine=self.tiers[tier].machine,
                folder=self.tiers[tier].folder,
                ranks=tuple(sorted(ranks[tier])),
            )
            for tier in sorted(ranks)
        )


def _tiers(
    asked: _Asked, manifests: Manifests
) -> list[tuple[RemoteDisk, frozenset[CheckpointOnDisk]]]:
    """One per directory of a machine's local tier, with what was seen in it."""
    if asked.found is None:
        return [(RemoteDisk(asked.client, asked.machine, asked.machine), frozenset())]
    made = []
    for folder in dict.fromkeys((asked.machine, *(one.folder for one in asked.found))):
        tier = RemoteDisk(asked.client, asked.machine, folder, manifests=manifests)
        tier.knows(asked.found)
        made.append((tier, _listing(asked, folder)))
    return made


def _listing(asked: _Asked, folder: str) -> frozenset[CheckpointOnDisk]:
    return frozenset(one for one in asked.found or () if one.folder == folder)
