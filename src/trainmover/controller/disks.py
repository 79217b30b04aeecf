"""Parts of a checkpoint on machines' own disks: who serves them, who best plays which rank. Pure.

Decides the order of the first machines by what their disks hold. Which checkpoint it is, and which
disk serves which file, is chosen beside the decider (`looking` asks for that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from trainmover.controller import shelf
from trainmover.controller.events import Disk
from trainmover.controller.kept import Kept, Restored
from trainmover.controller.move import Move
from trainmover.controller.state import Machine, State
from trainmover.protocol.journal import StartChosen
from trainmover.protocol.messages import DiskPart


def open_now(state: State) -> tuple[Disk, ...]:
    """Machines that can be heard now and have said where their agent serves."""
    stores = shelf.reachable(state)
    return tuple(
        Disk(machine=name, host=store.host, port=store.port)
        for name, store in sorted(stores.items())
        if store.port
    )


def addressed(state: State, parts: Iterable[DiskPart]) -> tuple[DiskPart, ...]:
    """`parts` with the place at which each is served now; those of machines that are gone go."""
    open_disks = {disk.machine: disk for disk in open_now(state)}
    return tuple(
        msgspec.structs.replace(
            part, host=open_disks[part.machine].host, port=open_disks[part.machine].port
        )
        for part in parts
        if part.machine in open_disks
    )


def gone(state: State, name: str, parts: Iterable[DiskPart]) -> tuple[str, ...]:
    """Machines that can't be counted on for `parts` of checkpoint `name`.

    Nobody hears them, or what was seen there was seen in another life of theirs.
    """
    wanted = {part.machine for part in parts}
    if not wanted:
        return ()
    agents, checks = dict(agents_now(state)), state.kept.disk_checks
    return tuple(
        machine
        for machine in sorted(wanted)
        if machine not in agents or checks.get((name, machine), agents[machine]) != agents[machine]
    )


def agents_now(state: State) -> tuple[tuple[str, str], ...]:
    """Machine and agent's incarnation of each disk that can be read now."""
    stores = state.kept.stores
    return tuple((disk.machine, stores[disk.machine].agent) for disk in open_now(state))


def checked(kept: Kept, found: Restored, agents: Iterable[tuple[str, str]]) -> Kept:
    """What is known once a look by these agents has found all of `found` whole."""
    names = {kept.restore, found.name, kept.durable.name if kept.durable is not None else ""}
    rest = {key: agent for key, agent in kept.disk_checks.items() if key[0] in names}
    parts = {part.machine for part in found.disks}
    news = {(found.name, machine): agent for machine, agent in agents if machine in parts}
    return replace(kept, disk_checks={**rest, **news})


def on_unreadable(move: Move, rank: int) -> None:
    """`rank` could not be started from the checkpoint: its disks are to be looked at again."""
    kept = move.state.kept
    parts = [part for part in kept.restore_disks if rank in part.ranks]
    doubted = {(kept.restore, part.machine): "" for part in parts}
    shelf.keep(move, replace(kept, disk_checks={**kept.disk_checks, **doubted}))


def may_tell(move: Move, machine: Machine) -> bool:
    """Whether an agent that has not said what it holds, or isn't heard, may still do so.

    Bounded: who is silent is lost after its limit, and who has registered says it at once.
    """
    state, config = move.state, move.state.config
    if machine.is_retired or machine.is_lost:
        return False
    if not machine.is_linked:
        return not move.has_waited(machine.heard_at, config.lost_after_s)
    since = machine.registered_at
    is_new = since is not None and not move.has_waited(since, config.report_timeout_s)
    return is_new and machine.name not in state.kept.stores


def any_may_tell(move: Move) -> bool:
    """Whether what is missing may still turn up at somebody."""
    machines = move.state.machines
    return any(may_tell(move, machines[name]) for name in sorted(machines))


def arranged(
    machines: tuple[str, ...], workers_per_machine: int, parts: Iterable[DiskPart]
) -> tuple[str, ...]:
    """`machines` in the order in which they play ranks: each where its disk has most.

    Where disks make no difference the order stays.
    """
    places = {name: at for at, name in enumerate(machines)}
    held = {(part.machine, rank) for part in parts for rank in part.ranks}
    counts = Counter((name, rank // workers_per_machine) for name, rank in held)
    claims = [
        (-count, index != places[name], index, places[name], name)
        for (name, index), count in counts.items()
        if name in places and index < len(machines)
    ]
    placed: dict[int, str] = {}
    taken: set[str] = set()
    for _, _, index, _, name in sorted(claims):
        if index not in placed and name not in taken:
            placed[index] = name
            taken.add(name)
    rest = iter(name for name in machines if name not in taken)
    return tuple(placed[index] if index in placed else next(rest) for index in range(len(machines)))


def start_of(restored: Restored) -> StartChosen:
    """The record of what a job starts from."""
    return StartChosen(
        name=restored.name,
        version=restored.version,
        run_id=restored.run_id,
        history=restored.history,
        disks=restored.disks,
    )
