"""Looks at machines' disks and into the storage of all: before a start, and before giving up.

Decides when somebody has to look, how long that is waited for, and what an answer means. A start
waits for it where machines have disks of their own: what they hold is known once their agents are
there. After a loss it is the last hope: a checkpoint whose commit nobody has lived to report counts
all the same, and where parts of the one to go back to are gone with a machine, an older one may be
whole. The looking itself, and the choice among what is there, happen beside the decider.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import disks, ending, restoring, shelf
from trainmover.controller.events import Disk, LookIntoStorage, StorageSeen
from trainmover.controller.kept import Durable, Look, Restored
from trainmover.controller.move import Move
from trainmover.controller.state import Forming, Freezing, Gathering
from trainmover.protocol import exits
from trainmover.protocol.journal import CheckpointKept, MachinesChosen

SLACK_S = 5.0
"""Behind the limit of the look itself, which answers even if it is abandoned."""
LOOKS_LIMIT = 8
"""For one freeze: with machines that come and go there is something else to see each time."""


def _ask(move: Move, *, freeze: int) -> None:
    kept = move.state.kept
    before = kept.look
    is_another = before is not None and freeze and before.freeze == freeze
    look = Look(
        number=before.number + 1 if before is not None else 1,
        deadline=move.in_(kept.keeping.checkpoint.load_timeout_s + SLACK_S),
        freeze=freeze,
        agents=disks.agents_now(move.state),
        count=before.count + 1 if before is not None and is_another else 1,
    )
    number = look.number
    shelf.keep(move, replace(kept, look=look))
    order = LookIntoStorage(
        number=number,
        is_start=not freeze,
        disks=(*disks.open_now(move.state), *_silent(move)),
        left=tuple((line.target.step, line.number) for line in kept.time_lines),
        history=kept.history,
        begun_at=kept.begun_at,
    )
    move.commands.append(order)
    names = ", ".join(disk.machine for disk in order.disks) or "nobody"
    move.because(f"look {number} into the storage, and at the disks of {names}")


def _silent(move: Move) -> tuple[Disk, ...]:
    """First machines that have not said where their disk is read: the answer is to name them."""
    phase = move.state.phase
    told = {disk.machine for disk in disks.open_now(move.state)}
    active = phase.active if isinstance(phase, Forming) else ()
    return tuple(Disk(machine=name, host="", port=0) for name in active if name not in told)


def on_seen(move: Move, event: StorageSeen) -> None:
    """The answer to a look; to one that nobody waits for any more it means nothing."""
    kept = move.state.kept
    look = kept.look
    if look is None or look.number != event.number or look.is_answered:
        return
    kept = replace(kept, look=replace(look, is_answered=True, reason=event.reason))
    if event.found is not None:
        kept = disks.checked(kept, event.found, look.agents)
    shelf.keep(move, kept)
    phase = move.state.phase
    if look.freeze and isinstance(phase, Freezing | Gathering):
        _take_hope(move, event.found)
    elif isinstance(phase, Forming) and kept.is_start_open:
        _take_start(move, phase, event)


# --------------------------------------------------------------------------- the start


def has_start(move: Move) -> bool:
    """Whether it is known what the job starts from, and still there; has it looked for if not."""
    phase, kept = move.state.phase, move.state.kept
    if not isinstance(phase, Forming):
        return False
    if not kept.is_start_open:
        missing = disks.gone(move.state, kept.restore, kept.restore_disks)
        if not missing:
            return True
        if _may_return(move, missing):
            return False
        _open_again(move, f"{', '.join(missing)} had parts of {kept.restore} and is gone")
        return False
    look = move.state.kept.look
    if look is None or look.is_answered:
        if _have_told(move, phase):
            _ask(move, freeze=0)
            _give_time(move, phase)
    elif move.now >= look.deadline:
        text = f"no checkpoint was chosen within {kept.keeping.checkpoint.load_timeout_s:g} s"
        ending.stop(move, exits.START_FAILED, text)
    return False


def _open_again(move: Move, reason: str) -> None:
    """A disk that was counted on is gone: choose again among what is left, a few times."""
    if move.count_try("look", 0, 0) > move.state.config.max_tries:
        ending.stop(move, exits.START_FAILED, f"nothing to start from: {reason}")
        return
    shelf.keep(move, replace(move.state.kept, is_start_open=True))
    move.because(f"chooses again: {reason}")


def _have_told(move: Move, phase: Forming) -> bool:
    """Whether every machine has said where its disk is read, or has had time to."""
    known = move.state.machines
    if any(name not in known or known[name].registered_at is None for name in phase.active):
        return False
    return not disks.any_may_tell(move)


def _may_return(move: Move, names: tuple[str, ...]) -> bool:
    known = move.state.machines
    return any(name in known and disks.may_tell(move, known[name]) for name in names)


def _give_time(move: Move, phase: Forming) -> None:
    """Reading every byte of a checkpoint may take longer than a start without one."""
    keeping = move.state.kept.keeping.checkpoint
    deadline = move.in_(keeping.load_timeout_s + move.state.config.start_timeout_s)
    move.enter(replace(phase, deadline=max(phase.deadline, deadline)))


def _take_start(move: Move, phase: Forming, event: StorageSeen) -> None:
    found = event.found
    if event.code:
        ending.stop(move, event.code, event.reason)
        return
    missing = disks.gone(move.state, found.name, found.disks) if found is not None else ()
    if missing:
        _open_again(move, f"{', '.join(missing)} had parts of it and is gone")
        return
    kept = replace(move.state.kept, is_start_open=False)
    if found is None:
        shelf.keep(move, kept)
        move.because("nothing to start from: a new beginning")
        return
    durable = Durable(name=found.name, version=found.version, disks=found.disks)
    kept = replace(
        kept,
        base=found.version,
        begun_at=found.version,
        restore=found.name,
        restore_disks=found.disks,
        durable=durable,
        begun_from=found.run_id,
        history=found.history,
    )
    shelf.keep(move, kept)
    move.append(disks.start_of(found))
    # Lineages of the checkpoint are numbers of another life of the job: never given again.
    move.note_number(found.version.lineage)
    move.because(f"starts from {found.name}")
    _arrange(move, phase, found)


def _arrange(move: Move, phase: Forming, found: Restored) -> None:
    """Who has a rank's files plays it: nothing of them travels then."""
    count = move.state.spec.workers_per_machine
    active = disks.arranged(phase.active, count, found.disks)
    if active == phase.active or move.state.facts is None:
        return
    move.append(MachinesChosen(machines=active, facts=move.state.facts))
    move.enter(replace(phase, active=active))
    move.because(f"ranks go where their files are: {', '.join(active)}")


# --------------------------------------------------------------------------- the last hope


def has_hope(move: Move, number: int) -> bool:
    """Whether what freeze `number` needs may still turn up: in an agent's memory, or by a look."""
    if restoring.has_hope(move):
        return True
    kept = move.state.kept
    if not kept.keeping.checkpoint.is_on:
        return False
    look = kept.look
    if look is None or look.freeze != number or _is_another_view(move, look):
        _ask(move, freeze=number)
        return True
    return (not look.is_answered and move.now < look.deadline) or _may_be_booting(move)


def _is_another_view(move: Move, look: Look) -> bool:
    """Whether other disks can be read than those in which nothing was found."""
    is_other = disks.agents_now(move.state) != look.agents
    return look.is_answered and is_other and look.count < LOOKS_LIMIT


def _may_be_booting(move: Move) -> bool:
    """Whether a machine that has gone may bring back the disk that is missing: a while only."""
    state = move.state
    kept, incident = state.kept, state.incident
    on_disk, durable = kept.on_disk, kept.durable
    is_there = on_disk is not None and not kept.is_void(on_disk.version)
    if incident is None or not (is_there or (durable is not None and durable.disks)):
        return False
    told = {disk.machine for disk in disks.open_now(state)}
    silent = [each for name, each in state.machines.items() if name not in told]
    may_return = any(not (each.is_retired or each.is_leaving) for each in silent)
    return may_return and not move.has_waited(incident.started_at, state.config.machine_wait_s)


def hope_or_stop(move: Move, reason: str) -> None:
    """Nothing known can restore a lost rank: wait for who may know more, or give up."""
    phase = move.state.phase
    if not isinstance(phase, Freezing | Gathering) or not has_hope(move, phase.number):
        ending.stop(move, exits.CANNOT_RESTORE, reason)
    elif isinstance(phase, Freezing):
        deadline = move.in_(move.state.config.resend_interval_s)
        move.enter(replace(phase, deadline=max(phase.deadline, deadline)))


def _take_hope(move: Move, found: Restored | None) -> None:
    kept = move.state.kept
    known = kept.durable
    if found is None or shelf.is_left(move.state, found.version):
        return
    missing = disks.gone(move.state, known.name, known.disks) if known is not None else ()
    if known is not None and not missing and known.version >= found.version:
        return
    durable = Durable(name=found.name, version=found.version, at=move.now, disks=found.disks)
    record = CheckpointKept(number=0, version=found.version, name=found.name, disks=found.disks)
    move.append(record)
    shelf.keep(move, replace(kept, durable=durable))
    if known is None or known.version < found.version:
        move.because(f"{found.name} was found: its commit had not been heard of")
        return
    text = f"parts of {known.name} on {', '.join(missing)} can't be counted on"
    move.because(f"{text}: {found.name} is what is left")
