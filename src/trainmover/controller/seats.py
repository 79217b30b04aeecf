"""Who takes a lost rank: respawned in place, a ready standby, or a machine still to come.

Decides the rung per rank and bounds every wait (P5). Upholds C94: a machine whose worker ended
keeps its rank while its agent lives, and the standby stays untouched; P1: a rank keeps its local
rank.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import classes, ending, incidents, lookup, pool
from trainmover.controller.move import Move
from trainmover.controller.state import Gathering, Seat, Worker
from trainmover.protocol import exits
from trainmover.topology import Member
from trainmover.units import Instant, after, seconds


def open_seat(move: Move, rank: int) -> Seat:
    """The first rung for `rank`."""
    member = lookup.members(move.state)[rank]
    if _may_respawn(move, member):
        incidents.note(move, f"respawn_rank_{rank}")
        deadline = move.in_(move.state.config.joiner_timeout_s)
        return Seat(rank=rank, way="respawn", deadline=deadline)
    return _standby_seat(move, rank)


def _may_respawn(move: Move, member: Member) -> bool:
    config, incident = move.state.config, move.state.incident
    machine = move.state.machines.get(member.machine)
    step = lookup.known_step(move.state)
    return (
        config.may_respawn
        and machine is not None
        and lookup.is_usable(machine)
        and (incident is None or member.rank not in incident.elsewhere)
        and machine.launch_failures < config.max_tries
        and move.tries_of("respawn", member.rank, step) < config.max_tries
    )


def _standby_seat(move: Move, rank: int) -> Seat:
    deadline = move.in_(move.state.config.machine_wait_s)
    return Seat(rank=rank, way="standby", deadline=deadline)


# --------------------------------------------------------------------------- filling


def fill(move: Move, is_fresh: bool) -> None:
    """Find a worker for every seat that has none, and give up on those that failed."""
    phase = move.state.phase
    if not isinstance(phase, Gathering):
        return
    pool.order_waiting(move)
    seats = tuple(_renewed(move, seat) for seat in phase.seats)
    move.enter(replace(phase, seats=seats))
    _fill_from_standbys(move, is_fresh)


def _renewed(move: Move, seat: Seat) -> Seat:
    """The seat after what has happened to its worker and machine."""
    worker = move.state.workers.get(seat.incarnation)
    if seat.incarnation and (worker is None or worker.role == "ending" or worker.reason):
        seat = replace(seat, incarnation="")
    if seat.way == "respawn":
        return _renewed_respawn(move, seat)
    machine = move.state.machines.get(worker.machine) if worker is not None else None
    if seat.incarnation and (machine is None or not lookup.is_usable(machine)):
        return replace(seat, incarnation="")
    return seat


def _renewed_respawn(move: Move, seat: Seat) -> Seat:
    member = lookup.members(move.state)[seat.rank]
    machine = move.state.machines.get(member.machine)
    is_late = move.now >= seat.deadline
    if machine is None or not lookup.is_usable(machine) or is_late:
        if is_late and seat.incarnation:
            pool.end(move, seat.incarnation, "was not ready as a joiner in time")
        return _standby_seat(move, seat.rank)
    if seat.incarnation:
        return seat
    old = move.state.workers.get(member.incarnation)
    if old is not None:
        # Only when the old process is reaped nothing of it can act (protocol C2).
        pool.end(move, member.incarnation, "replaced in place")
        since = old.ending_since if old.ending_since is not None else move.now
        is_stuck = move.has_waited(since, move.state.config.reap_timeout_s)
        return _standby_seat(move, seat.rank) if is_stuck else seat
    if not _may_respawn(move, member):
        return _standby_seat(move, seat.rank)
    step = lookup.known_step(move.state)
    move.count_try("respawn", seat.rank, step)
    return replace(seat, incarnation=_respawn(move, member).incarnation)


def _respawn(move: Move, member: Member) -> Worker:
    local_rank = lookup.local_rank_of(move.state, member.rank)
    for worker in lookup.workers_on(move.state, member.machine):
        is_idle = worker.role in {"starting", "standby"} and not worker.reason
        if is_idle and worker.local_rank == local_rank:
            return worker  # left over from an attempt that was aborted
    move.because(f"respawn rank {member.rank} on {member.machine}")
    return pool.launch(move, member.machine, local_rank)


def _fill_from_standbys(move: Move, is_fresh: bool) -> None:
    phase = move.state.phase
    assert isinstance(phase, Gathering)
    open_seats = [s for s in phase.seats if s.way == "standby" and not s.incarnation]
    if not open_seats:
        return
    given: dict[int, str] = {}
    for machine in _machines_lost(move, open_seats):
        ranks = [s.rank for s in open_seats if _machine_of(move, s.rank) == machine]
        for rank, name in _match(move, ranks, given, is_fresh).items():
            given[rank] = name
    seats = tuple(
        replace(seat, incarnation=given[seat.rank]) if seat.rank in given else seat
        for seat in phase.seats
    )
    move.enter(replace(phase, seats=seats))
    for rank, name in sorted(given.items()):
        move.because(f"{name} takes rank {rank}")


def _machine_of(move: Move, rank: int) -> str:
    return lookup.members(move.state)[rank].machine


def _machines_lost(move: Move, open_seats: list[Seat]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_machine_of(move, seat.rank) for seat in open_seats))


def _match(move: Move, ranks: list[int], given: dict[int, str], is_fresh: bool) -> dict[int, str]:
    """Standbys for the ranks of one lost machine: together on one machine if possible."""
    free = [w for w in candidates(move, is_fresh) if w.incarnation not in given.values()]
    machines = tuple(dict.fromkeys(worker.machine for worker in free))
    best: dict[int, str] = {}
    best_score = (0, 0)
    # Its own machine comes last: respawning there is another rung, which has been ruled out.
    for machine in sorted(machines, key=lambda name: name == _machine_of(move, ranks[0])):
        here = [worker for worker in free if worker.machine == machine]
        found = assign(move, ranks, here)
        alike = sum(_is_alike(move, rank, name) for rank, name in found.items())
        if (len(found), alike) > best_score:
            best, best_score = found, (len(found), alike)
    if len(best) < len(ranks):
        rest = [w for w in free if w.incarnation not in best.values()]
        best = {**best, **assign(move, [r for r in ranks if r not in best], rest)}
    return best


def candidates(move: Move, is_fresh: bool) -> tuple[Worker, ...]:
    """Standbys that may join now and have not been given a seat."""
    phase = move.state.phase
    seated = {s.incarnation for s in phase.seats} if isinstance(phase, Gathering) else set()
    found = []
    for worker in lookup.standbys(move.state):
        if worker.incarnation in seated or worker.reason:
            continue
        if (is_fresh and worker.is_up) or (
            lookup.is_ready(worker) and not _has_other_sequence(move, worker)
        ):
            found.append(worker)
    return tuple(found)


def _has_other_sequence(move: Move, worker: Worker) -> bool:
    """Whether it would call other collectives than the stayers do: then it is not used (A18)."""
    phase = move.state.phase
    own = worker.readiness.sequence_digest if worker.readiness is not None else ""
    if not own or not isinstance(phase, Gathering):
        return False
    if worker.readiness is not None and worker.readiness.answers == "recorded":
        # Call by call it did what a member of its class did; ranks of one class may differ in the
        # order of a pipeline's warm-up, and a lost class may have no other rank to compare with.
        return False
    seen = {
        report.sequence_digest
        for report in phase.reports.values()
        if report.rank >= 0 and report.sequence_digest
    }
    if not seen or own in seen:
        return False
    move.because(f"{worker.incarnation} calls other collectives than the job's ranks")
    return True


def assign(move: Move, ranks: list[int], workers: list[Worker]) -> dict[int, str]:
    """A worker of the right local rank for each rank, one of the same role class before others."""
    found: dict[int, str] = {}
    for rank in ranks:
        local_rank = lookup.local_rank_of(move.state, rank)
        fitting = [
            worker
            for worker in workers
            if worker.local_rank == local_rank and worker.incarnation not in found.values()
        ]
        fitting.sort(
            key=lambda w: (
                not _is_alike(move, rank, w.incarnation),
                not _covers(move, rank, w.incarnation),
                w.as_rank != rank,
            )
        )
        if fitting:
            found[rank] = fitting[0].incarnation
    return found


def _is_alike(move: Move, rank: int, name: str) -> bool:
    """Whether the standby is built as `rank`'s class of roles (else it enters `main` again)."""
    readiness = move.state.workers[name].readiness
    if readiness is None:
        return False
    role_class = classes.class_of(move.state, rank)
    if role_class and readiness.classes:
        return readiness.classes[-1] == role_class
    return readiness.identity == lookup.identity_of(move.state, rank)


def _covers(move: Move, rank: int, name: str) -> bool:
    """Whether the standby has walked through `rank`'s class."""
    readiness = move.state.workers[name].readiness
    role_class = classes.class_of(move.state, rank)
    return readiness is not None and bool(role_class) and role_class in readiness.classes


# --------------------------------------------------------------------------- taken or given up


def are_taken(move: Move, phase: Gathering, is_fresh: bool) -> bool:
    """Whether every lost rank has somebody who can join; stops the job at a seat's deadline."""
    waiting = [seat for seat in phase.seats if not _is_taken(move, seat, is_fresh)]
    if not waiting:
        return True
    hopeless = [seat for seat in waiting if _is_hopeless(move, seat)]
    if hopeless:
        ranks = ", ".join(str(seat.rank) for seat in hopeless)
        text = (
            f"no machine could take rank {ranks} within {move.state.config.machine_wait_s:g} s: "
            f"{_why_none(move)}; start a machine"
        )
        ending.stop(move, exits.NO_MACHINE, text)
    return False


def _why_none(move: Move) -> str:
    reasons = []
    for worker in lookup.standbys(move.state):
        why = worker.reason
        if not why and _has_other_sequence(move, worker):
            why = "calls other collectives than the job's ranks"
        reasons.append(f"{worker.machine}: {why or 'not ready yet'}")
    return "no standby is ready (" + "; ".join(reasons) + ")" if reasons else "there is no standby"


def _is_taken(move: Move, seat: Seat, is_fresh: bool) -> bool:
    worker = move.state.workers.get(seat.incarnation)
    if worker is None or worker.role == "ending" or worker.reason:
        return False
    return worker.is_up if is_fresh else lookup.is_ready(worker)


def _is_hopeless(move: Move, seat: Seat) -> bool:
    return seat.way == "standby" and move.now >= seat_deadline(move, seat)


def seat_deadline(move: Move, seat: Seat) -> Instant:
    """When waiting for `seat` ends; a standby that is being built is given its time."""
    local_rank = lookup.local_rank_of(move.state, seat.rank)
    limit = seconds(move.state.config.joiner_timeout_s)
    building = [
        after(worker.ordered_at or worker.launched_at, limit)
        for machine in lookup.usable_machines(move.state)
        for worker in lookup.workers_on(move.state, machine.name)
        if worker.role in {"starting", "standby"} and not worker.reason
        if worker.local_rank == local_rank and worker.readiness is None
    ]
    return max([seat.deadline, *building])
