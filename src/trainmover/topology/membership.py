"""Who plays which rank in one generation, who talks to whom, and who backs up whom.

Decides nothing about time or failure: a membership is a value. The partner functions are the one
place that fixes the shape of the job's channels, so that every rank computes the same set and
the cost of replacing one member stays logarithmic in the number of ranks.
"""

from __future__ import annotations

import msgspec

BACKUP_COUNT = 2
"""Peers that hold a rank's personal state (protocol.md, finding 6)."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process in the role of one rank."""

    rank: int
    incarnation: str
    """Unique per process life, e.g. ``m2.0.1f3a``; plans name incarnations, never hosts."""
    machine: str
    host: str
    """Address its channels listen on."""
    port: int


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one generation, ordered by rank: ``members[r].rank == r``."""

    generation: int
    members: tuple[Member, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def rank_of(self, incarnation: str) -> int | None:
        """Rank played by `incarnation`; None for a non-member."""
        for member in self.members:
            if member.incarnation == incarnation:
                return member.rank
        return None

    def machines(self) -> tuple[str, ...]:
        """Machines with at least one member, in rank order, each once."""
        return tuple(dict.fromkeys(member.machine for member in self.members))


def gate_peers(rank: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """(to, from) ranks of each gate round: dissemination, ceil(log2(world_size)) rounds.

    After round i a rank has seen the flags of the 2**(i+1) ranks up to and including itself;
    maximum is idempotent, so overlap at the last round does no harm.
    """
    peers = []
    distance = 1
    while distance < world_size:
        peers.append(((rank + distance) % world_size, (rank - distance) % world_size))
        distance *= 2
    return tuple(peers)


def backups_of(rank: int, membership: Membership) -> tuple[int, ...]:
    """Ranks that hold `rank`'s personal state, nearest first, never on its own machine.

    The first is the round-0 partner of the gate where machines allow it. With fewer than two
    other machines there are fewer than `BACKUP_COUNT` distinct machines to choose from; then the
    same machine may serve twice, by different ranks, and with one machine there is none.
    """
    own = membership.members[rank].machine
    world_size = membership.world_size
    chosen: list[int] = []
    machines: set[str] = set()
    for offset in range(1, world_size):
        peer = (rank + offset) % world_size
        machine = membership.members[peer].machine
        if machine != own and machine not in machines:
            chosen.append(peer)
            machines.add(machine)
            if len(chosen) == BACKUP_COUNT:
                return tuple(chosen)
    for offset in range(1, world_size):
        peer = (rank + offset) % world_size
        is_elsewhere = membership.members[peer].machine != own
        if is_elsewhere and peer not in chosen and len(chosen) < BACKUP_COUNT:
            chosen.append(peer)
    return tuple(chosen)


def wards_of(rank: int, membership: Membership) -> tuple[int, ...]:
    """Ranks whose personal state `rank` holds, ascending."""
    world_size = membership.world_size
    wards: list[int] = []
    machines: set[str] = set()
    for offset in range(1, world_size):
        peer = (rank - offset) % world_size
        if rank in backups_of(peer, membership):
            wards.append(peer)
        machines.add(membership.members[peer].machine)
        if len(machines) > BACKUP_COUNT + 1:
            break  # whoever is farther away has two other machines in between: a step pays no more
    return tuple(sorted(wards))


class MembershipDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of two memberships of the same world size."""

    joiners: tuple[Member, ...]
    leavers: tuple[Member, ...]
    stayers: tuple[Member, ...]
    """Members of both, as they are in the new membership."""


def delta(old: Membership, new: Membership) -> MembershipDelta:
    """What changes from `old` to `new`; a respawned worker counts as leaver and joiner."""
    before = {member.incarnation for member in old.members}
    after = {member.incarnation for member in new.members}
    return MembershipDelta(
        joiners=tuple(member for member in new.members if member.incarnation not in before),
        leavers=tuple(member for member in old.members if member.incarnation not in after),
        stayers=tuple(member for member in new.members if member.incarnation in before),
    )
