"""Role classes: who keeps which recording, and what a standby walks through.

Decides the keeper of each class (its lowest rank), the order of a standby's classes (the most
common one last), which workers of a machine rehearse together, and how long a standby waits for
recordings: while the job is on its way to its first steps, bounded, and not a moment longer once
somebody is lost. Which ranks are alike is found by the ranks themselves.
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
NEIGHBOUR_WAIT_S = 10.0
"""How long a standby's worker waits for the other workers of its machine to be up."""


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
        return None if _expects_neighbours(move, worker) else _walk(move, worker)
    if not _may_wait(move, worker):
        return _walk(move, worker) if are_known(move) else ()
    return None


def _expects_neighbours(move: Move, worker: Worker) -> bool:
    """Whether another worker of its machine is about to be up; bounded."""
    if not _may_wait(move, worker) or move.has_waited(worker.launched_at, NEIGHBOUR_WAIT_S):
        return False
    here = lookup.workers_on(move.state, worker.machine)
    return any(each.role == "starting" and not each.reason for each in here)


def _are_settled(move: Move) -> bool:
    """Whether the recording of every class is there, or will never be."""
    for digest, ranks in groups(move.state).items():
        if digest not in move.state.classes.stored and _keeper(move, ranks) is not None:
            return False
    return True


def _may_wait(move: Move, worker: Worker) -> bool:
    is_calm = _is_calm(move)
    if move.state.membership is not None and _has_joiner(move):
        is_calm = False  # a joiner enters the loop in the middle: its first iteration is not seen
    limit_s = move.state.config.recording_wait_s
    return is_calm and not move.has_waited(worker.launched_at, limit_s)


def _is_calm(move: Move) -> bool:
    """Whether nobody is missing: the job trains, or is on its way to its first steps."""
    match move.state.phase:
        case Forming() | Training():
            return True
        case Switching(plan=plan):
            return plan.kind == "form"
        case _:
            return False


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
    """Every kind of machine it may have to play and has a recording of; the most common one last.

    A kind is the classes of a machine's ranks, one after another: with one worker per machine a
    class. Workers of one machine walk through the same kinds in the same order.
    """
    per_machine = move.state.spec.workers_per_machine
    neighbours = _neighbours(move, worker)
    found: list[tuple[int, bool, int, Rehearsal]] = []
    for kind, blocks in _kinds(move.state).items():
        digest = kind[worker.local_rank]
        stored = move.state.classes.stored.get(digest)
        if stored is None or stored.reason:
            continue
        own = worker.as_rank // per_machine
        block = own if own in blocks and not neighbours else blocks[0]
        rehearsal = Rehearsal(
            role_class=digest,
            as_rank=block * per_machine + worker.local_rank,
            ranks=groups(move.state)[digest],
            fingerprint=stored.fingerprint,
            file=stored.file,
            bytes=stored.bytes,
            keeper=_member(move, stored.incarnation),
            neighbours=neighbours,
        )
        is_wanted = own in blocks and _is_seated(move, worker)
        found.append((len(blocks), is_wanted, -blocks[0], rehearsal))
    found.sort(key=lambda each: (each[1], each[0], each[2]))
    walked = tuple(rehearsal for *_, rehearsal in found)
    return walked if neighbours else _each_once(walked)


def _each_once(walked: tuple[Rehearsal, ...]) -> tuple[Rehearsal, ...]:
    """A worker that rehearses alone has no use for a class twice; the later time counts."""
    last = {rehearsal.role_class: rehearsal for rehearsal in walked}
    return tuple(each for each in walked if last[each.role_class] is each)


def _kinds(state: State) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Numbers of the machines of each kind, by the classes of their ranks."""
    per_machine = state.spec.workers_per_machine
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for block in range(lookup.machine_count(state)):
        ranks = range(block * per_machine, (block + 1) * per_machine)
        kind = tuple(class_of(state, rank) for rank in ranks)
        found[kind] = (*found.get(kind, ()), block)
    return found


def _neighbours(move: Move, worker: Worker) -> tuple[str, ...]:
    """The machine's standbys by local rank, if all of them rehearse now and the same; else none."""
    per_machine = move.state.spec.workers_per_machine
    here = {
        each.local_rank: each
        for each in lookup.workers_on(move.state, worker.machine)
        if each.role == "standby" and each.is_up and not each.reason and each.readiness is None
    }
    names = tuple(here[place].incarnation for place in sorted(here))
    if per_machine < 2 or len(names) < per_machine or not _is_calm(move):
        return ()
    for other in here.values():
        ordered = other.rehearsals
        if ordered is not None and not any(each.neighbours == names for each in ordered):
            return ()  # it has begun alone
    known = move.state.classes.stored
    digests = {digest for kind in _kinds(move.state) for digest in kind}
    is_recorded = all(digest in known and not known[digest].reason for digest in digests)
    return names if is_recorded else ()


def not_rehearsed(state: State, worker: Worker) -> tuple[str, ...]:
    """Classes a ready standby may have to play and has not walked through, and why."""
    per_machine, readiness = state.spec.workers_per_machine, worker.readiness
    if readiness is None or len(state.classes.by_rank) < state.spec.world_size:
        return ()
    walked = {*readiness.classes, class_of(state, readiness.as_rank)}
    found = []
    for digest, ranks in groups(state).items():
        is_possible = any(rank % per_machine == worker.local_rank for rank in ranks)
        if is_possible and digest not in walked:
            stored = state.classes.stored.get(digest)
            why = "" if stored is None else stored.reason
            found.append(f"{digest}: {why or 'no recording when it began'}")
    return tuple(found)


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
