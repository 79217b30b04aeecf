"""Role classes: who keeps which recording, and what a standby walks through.

Decides the keeper of each class (its lowest rank), the order of a standby's classes (the most
common one last) and how long a standby waits for recordings: while the job is on its way to its
first steps, bounded, and not a moment longer once somebody is lost. Which ranks are alike is found
by the ranks themselves.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import lookup
from trainmover.controller.move import Move
from trainmover.controller.state import Forming, State, Switching, Training, Worker
from trainmover.protocol.messages import KeepRecording, RecordingStored, Rehearsal, RoleClass
from trainmover.topology import Member

RECORDED = (("rehearsal.answers", "recorded"), ("rehearsal.answers", "zeros"))
"""Settings under which members record their first iterations (zeros: to show what they lack)."""


def does_record(move: Move) -> bool:
    """Whether recordings are made in this job."""
    return any(setting in RECORDED for setting in move.state.spec.settings)


def class_of(state: State, rank: int) -> str:
    """Digest of the class of `rank`; empty where it is not known."""
    told = state.classes.by_rank.get(rank)
    return told.digest if told is not None else ""


def groups(state: State) -> dict[str, tuple[int, ...]]:
    """Ranks of each known class, by its digest; the lowest rank's class first."""
    by_rank = state.classes.by_rank
    found: dict[str, tuple[int, ...]] = {}
    for rank in sorted(by_rank):
        digest = by_rank[rank].digest
        if digest:
            found[digest] = (*found.get(digest, ()), rank)
    return found


# --------------------------------------------------------------------------- members


def on_role_class(move: Move, body: RoleClass) -> None:
    """A member has told its class; with the last one the keepers are chosen."""
    membership = move.state.membership
    if membership is None or membership.rank_of(body.incarnation) != body.rank:
        return
    known = move.state.classes
    if known.by_rank.get(body.rank) == body:
        return
    stored = known.stored
    if body.file:
        there = RecordingStored(
            incarnation=body.incarnation,
            fingerprint=body.fingerprint,
            role_class=body.digest,
            file=body.file,
            bytes=body.bytes,
        )
        stored = {body.digest: there, **stored}
    by_rank = {**known.by_rank, body.rank: body}
    move.state = replace(move.state, classes=replace(known, by_rank=by_rank, stored=stored))
    if are_known(move):
        found = groups(move.state)
        shown = "; ".join(f"{name}: ranks {_list(ranks)}" for name, ranks in found.items())
        move.because(f"{len(found)} role classes ({shown})")
        _tell_keepers(move)


def are_known(move: Move) -> bool:
    """Whether every rank has told its class (or that it has none)."""
    return len(move.state.classes.by_rank) == move.state.spec.world_size


def _keeper(move: Move, ranks: tuple[int, ...]) -> RoleClass | None:
    """The lowest rank of a class that still holds its recording."""
    for rank in ranks:
        told = move.state.classes.by_rank[rank]
        member = lookup.members(move.state)[rank]
        if told.bytes >= 0 and not told.file and member.incarnation == told.incarnation:
            return told
    return None


def _tell_keepers(move: Move) -> None:
    for digest, ranks in groups(move.state).items():
        if digest in move.state.classes.stored:
            continue
        keeper = _keeper(move, ranks)
        for rank in ranks:
            told = move.state.classes.by_rank[rank]
            body = KeepRecording(
                term=move.state.term,
                fingerprint=told.fingerprint,
                role_class=digest,
                ranks=ranks,
                is_keeper=told is keeper,
            )
            move.tell(told.incarnation, body)


def ask_again(move: Move) -> None:
    """Keepers that have not answered are told again."""
    if does_record(move) and are_known(move):
        _tell_keepers(move)


def on_stored(move: Move, body: RecordingStored) -> None:
    """A keeper has written its recording, or can't."""
    known = move.state.classes
    if known.stored.get(body.role_class) == body:
        return
    stored = {**known.stored, body.role_class: body}
    move.state = replace(move.state, classes=replace(known, stored=stored))
    how = body.reason or f"{body.bytes} bytes"
    move.because(f"recording of class {body.role_class}: {how}")
    _order_waiting(move)


def _order_waiting(move: Move) -> None:
    from trainmover.controller import pool

    pool.order_waiting(move)


# --------------------------------------------------------------------------- standbys


def choose(move: Move, worker: Worker) -> tuple[Rehearsal, ...] | None:
    """What a standby walks through; empty: loop-back. None: wait for what is about to be known."""
    if not does_record(move):
        return ()
    if are_known(move) and _are_settled(move):
        return _walk(move, worker)
    if not _may_wait(move, worker):
        return _walk(move, worker) if are_known(move) else ()
    return None


def _are_settled(move: Move) -> bool:
    """Whether the recording of every class is there, or will never be."""
    for digest, ranks in groups(move.state).items():
        if digest not in move.state.classes.stored and _keeper(move, ranks) is not None:
            return False
    return True


def _may_wait(move: Move, worker: Worker) -> bool:
    match move.state.phase:
        case Forming():
            is_calm = True
        case Switching(plan=plan):
            is_calm = plan.kind == "form"
        case Training():
            is_calm = True
        case _:
            is_calm = False
    if move.state.membership is not None and _has_joiner(move):
        is_calm = False  # a joiner enters the loop in the middle: its first iteration is not seen
    limit_s = move.state.config.recording_wait_s
    return is_calm and not move.has_waited(worker.launched_at, limit_s)


def _has_joiner(move: Move) -> bool:
    """Whether some rank that has not told its class never will."""
    by_rank, workers = move.state.classes.by_rank, move.state.workers
    return any(
        member.rank not in by_rank
        and member.incarnation in workers
        and workers[member.incarnation].readiness is not None
        for member in lookup.members(move.state)
    )


def _walk(move: Move, worker: Worker) -> tuple[Rehearsal, ...]:
    """Every class it may have to play and has a recording of; the most common one last."""
    per_machine = move.state.spec.workers_per_machine
    likely = class_of(move.state, worker.as_rank)
    found: list[tuple[int, bool, int, Rehearsal]] = []
    for digest, ranks in groups(move.state).items():
        fitting = tuple(rank for rank in ranks if rank % per_machine == worker.local_rank)
        stored = move.state.classes.stored.get(digest)
        if not fitting or stored is None or stored.reason:
            continue
        as_rank = worker.as_rank if worker.as_rank in fitting else fitting[0]
        rehearsal = Rehearsal(
            role_class=digest,
            as_rank=as_rank,
            ranks=ranks,
            fingerprint=stored.fingerprint,
            file=stored.file,
            bytes=stored.bytes,
            keeper=_member(move, stored.incarnation),
        )
        is_wanted = digest == likely and _is_seated(move, worker)
        found.append((len(ranks), is_wanted, -fitting[0], rehearsal))
    found.sort(key=lambda each: (each[1], each[0], each[2]))
    return tuple(rehearsal for *_, rehearsal in found)


def _is_seated(move: Move, worker: Worker) -> bool:
    """Whether its rank is known to be the one it will play (respawned in place)."""
    return any(
        member.rank == worker.as_rank and member.machine == worker.machine
        for member in lookup.members(move.state)
    )


def _member(move: Move, incarnation: str) -> Member | None:
    for member in lookup.members(move.state):
        if member.incarnation == incarnation:
            return member
    return None


def _list(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
