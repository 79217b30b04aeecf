"""Parts of a checkpoint on machines' own disks: who serves them, who best plays which rank. Pure.

Decides the order of the first machines by what their disks hold. Which checkpoint it is, and which
disk serves which file, is chosen beside the decider (`looking` asks for that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from trainmover.controller import shelf
from trainmover.controller.events import Disk
from trainmover.controller.kept import Restored
from trainmover.controller.state import State
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


def gone(state: State, parts: Iterable[DiskPart]) -> tuple[str, ...]:
    """Machines of `parts` that nobody hears."""
    wanted = {part.machine for part in parts}
    return tuple(sorted(wanted - {disk.machine for disk in open_now(state)})) if wanted else ()


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
