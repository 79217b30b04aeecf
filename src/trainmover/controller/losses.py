"""What a loss means in each phase: of a member, a joiner, a standby, a machine, a connection.

Decides between abort, incident, a further freeze and nothing at all. Evidence before verdict (C7):
a silent machine is lost only while no gate passes and some other machine is heard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from trainmover.controller import (
    agreement,
    disks,
    ending,
    finishing,
    forming,
    incidents,
    lookup,
    pool,
    recovery,
    shelf,
    switchover,
)
from trainmover.controller.move import Move
from trainmover.controller.state import (
    Completing,
    Ended,
    Ending,
    Finishing,
    Flagged,
    Forming,
    Freezing,
    Gathering,
    Preparing,
    ScriptFailure,
    Switching,
    Training,
    Worker,
)
from trainmover.protocol import exits
from trainmover.protocol.journal import Culprit
from trainmover.protocol.messages import Broken, Edge, ScriptFailed, WorkerExited
from trainmover.units import after, seconds

# --------------------------------------------------------------------------- workers


def worker_gone(move: Move, name: str, evidence: str) -> None:
    """A process is over: remove it, then see what it was needed for."""
    worker = move.state.workers.get(name)
    if worker is None:
        return
    move.bury(name)
    move.because(f"{name} is gone: {evidence}")
    if isinstance(move.state.phase, Forming):
        forming.on_gone(move, worker, evidence)
    elif worker.role in {"starting", "standby"} and worker.machine in move.state.machines:
        pool.on_launch_failed(move, worker, evidence)
    if worker.released_number and not move.state.config.return_to_pool:
        pool.dismiss(move, worker.machine)
    participant_lost(move, name, evidence)


def worker_ended_by_us(move: Move, name: str, evidence: str) -> None:
    """A worker that must not go on, though its process lives: kill it and count it as lost."""
    pool.end(move, name, evidence)
    participant_lost(move, name, evidence)


def participant_lost(move: Move, name: str, evidence: str) -> None:
    """React to the loss of whoever `name` was: member, leaver, joiner or nobody of importance."""
    membership = move.state.membership
    rank = membership.rank_of(name) if membership is not None else None
    phase = move.state.phase
    match phase:
        case Training():
            if rank is not None:
                recovery.open_incident(move, evidence, _culprit(move, rank, evidence))
        case Preparing() | Flagged() | Switching():
            _lost_inside_plan(move, rank, name, evidence)
        case Freezing():
            if rank is not None:
                incidents.blame(move, _culprit(move, rank, evidence))
            recovery.check(move)
        case Gathering():
            if rank is not None and all(seat.rank != rank for seat in phase.seats):
                incidents.blame(move, _culprit(move, rank, evidence))
                recovery.gather_again(move, phase)
            else:
                recovery.advance(move)
        case Finishing(step=step, is_stopped=is_stopped):
            if rank is not None:
                finishing.complete(move, step, is_stopped=is_stopped)
        case Completing():
            ending.check_completed(move, phase)
        case Forming() | Ending() | Ended():
            pass
        case _ as never:
            assert_never(never)


def _lost_inside_plan(move: Move, rank: int | None, name: str, evidence: str) -> None:
    phase = move.state.phase
    assert isinstance(phase, Preparing | Flagged | Switching)
    plan = phase.plan
    match plan.kind:
        case "form":
            if plan.membership.rank_of(name) is not None and isinstance(phase, Switching):
                forming.start_over(move, phase, evidence)
        case "planned":
            if rank is None and name not in plan.joiners:
                return
            switchover.give_up(move, evidence)
            if rank is not None:
                recovery.open_incident(move, evidence, _culprit(move, rank, evidence))
        case "unplanned":
            if plan.membership.rank_of(name) is not None:
                culprits = _culprit(move, rank, evidence) if rank is not None else ()
                recovery.refreeze(move, evidence, culprits)
        case _ as never:
            assert_never(never)


def _culprit(move: Move, rank: int, evidence: str) -> tuple[Culprit, ...]:
    member = lookup.members(move.state)[rank]
    return (
        Culprit(
            rank=rank,
            incarnation=member.incarnation,
            machine=member.machine,
            evidence=evidence,
        ),
    )


# --------------------------------------------------------------------------- connections


def on_broken(move: Move, worker: Worker, body: Broken) -> None:
    """Connections of the committed generation failed, or a gate waited too long."""
    if body.generation != move.state.generation or worker.role != "member":
        return
    phase = move.state.phase
    rank = lookup.members(move.state)[0].rank
    membership = move.state.membership
    if membership is not None:
        rank = membership.rank_of(body.incarnation) or 0
    reason = f"rank {rank} at step {body.step}: {_text(move, body.edges)}"
    if isinstance(phase, Preparing | Flagged | Switching) and phase.plan.kind == "planned":
        switchover.give_up(move, reason)
        phase = move.state.phase
    if isinstance(phase, Training):
        recovery.open_incident(move, reason)
        recovery.note_edges(move, body.incarnation, body.edges)
        recovery.check(move)
    elif isinstance(phase, Freezing):
        incident = move.state.incident
        if incident is not None and body.edges and not incident.edges:
            # The poisoned often speak before those who saw the break: theirs is the better reason.
            move.state = replace(move.state, incident=replace(incident, reason=reason))
        recovery.note_edges(move, body.incarnation, body.edges)
        recovery.check(move)
    elif isinstance(phase, Finishing):
        # One passed finish gate proves that all have done all steps, also whoever is stuck in it.
        finishing.complete(move, phase.step, is_stopped=phase.is_stopped)


def _text(move: Move, edges: tuple[Edge, ...]) -> str:
    if not edges:
        return "its generation is broken, no connection named"
    membership = move.state.membership
    parts = []
    for edge in edges[:4]:
        rank = membership.rank_of(edge.peer) if membership is not None else None
        peer = f"rank {rank}" if rank is not None else edge.peer
        parts.append(f"connection to {peer} failed ({edge.reason})")
    return ", ".join(parts)


def on_plan_edge(move: Move, name: str, number: int, edge: Edge) -> None:
    """A connection that only the next generation uses failed while it was being prepared."""
    phase = move.state.phase
    if not isinstance(phase, Preparing | Flagged | Switching) or phase.plan.number != number:
        return
    reason = f"{name} could not prepare its connection to {edge.peer}: {edge.reason}"
    match phase.plan.kind:
        case "form":
            assert isinstance(phase, Switching)
            forming.start_over(move, phase, reason)
        case "planned":
            switchover.give_up(move, reason)
        case "unplanned":
            recovery.note_edges(move, name, (edge,))
            rank = phase.plan.membership.rank_of(name)
            if phase.plan.is_rollback and rank is not None:
                shelf.distrust(move, edge.peer, rank, phase.plan.target)
            for source in phase.plan.sources:
                if source.rank == rank and source.kind == "increments":
                    agreement.distrust_source(move, edge.peer, source, phase.plan.target)
            _end_stubborn_joiner(move, (name, edge.peer))
            recovery.refreeze(move, reason)
        case _ as never:
            assert_never(never)


def _end_stubborn_joiner(move: Move, ends: tuple[str, str]) -> None:
    """A joiner that again and again can't be reached is replaced by another."""
    phase = move.state.phase
    assert isinstance(phase, Preparing | Flagged | Switching)
    for name in ends:
        if name not in phase.plan.joiners:
            continue
        rank = phase.plan.membership.rank_of(name) or 0
        count = move.count_try(f"connecting {name}", rank, lookup.known_step(move.state))
        if count >= move.state.config.max_tries:
            pool.end(move, name, "could not be connected")


def how_it_ended(body: WorkerExited) -> str:
    """The end of a process in one clause, with the last line of its log."""
    if body.signal is not None:
        how = f"ended by signal {body.signal}"
    elif body.exit_code is not None:
        how = f"ended with exit code {body.exit_code}"
    else:
        how = "ended"
    tail = body.log_tail.strip().splitlines()
    return f"worker {body.incarnation} {how}" + (f" ({tail[-1][:200]})" if tail else "")


# --------------------------------------------------------------------------- scripts


def on_script_failed(move: Move, worker: Worker, body: ScriptFailed) -> None:
    """The user's code raised: the job's end, unless the machine is to blame or it ran out."""
    evidence = f"{body.error} (step {body.step})"
    is_founder = isinstance(move.state.phase, Forming)
    if worker.role in {"starting", "standby"} and not is_founder and not _is_joining(move, worker):
        pool.on_launch_failed(move, worker, evidence)
        worker_ended_by_us(move, worker.incarnation, evidence)
    elif body.was_running_out:
        worker_ended_by_us(move, worker.incarnation, f"raised while running out: {evidence}")
    elif body.is_machine_caused:
        _machine_failed(move, worker, evidence)
    else:
        _script_failed(move, worker, body)


def _is_joining(move: Move, worker: Worker) -> bool:
    phase = move.state.phase
    return (
        isinstance(phase, Switching)
        and phase.plan.is_fresh_start
        and phase.plan.membership.rank_of(worker.incarnation) is not None
    )


def _machine_failed(move: Move, worker: Worker, evidence: str) -> None:
    """Like a lost worker; another machine is better if one is ready."""
    reason = f"its machine failed: {evidence}"
    membership = move.state.membership
    rank = membership.rank_of(worker.incarnation) if membership is not None else None
    if rank is not None and isinstance(move.state.phase, Training):
        _doubt_disks(move, move.state.phase, rank)
    worker_ended_by_us(move, worker.incarnation, reason)
    incident = move.state.incident
    if rank is None or incident is None or incident.is_planned:
        return
    if any(lookup.is_ready(standby) for standby in lookup.standbys(move.state)):
        elsewhere = tuple(sorted({*incident.elsewhere, rank}))
        move.state = replace(move.state, incident=replace(incident, elsewhere=elsewhere))


def _doubt_disks(move: Move, phase: Training, rank: int) -> None:
    """What `rank` was to begin from may be why: its own machine, or the one that it reads from."""
    if move.state.is_fresh and not phase.has_passed_gate:
        disks.on_unreadable(move, rank)


def _script_failed(move: Move, worker: Worker, body: ScriptFailed) -> None:
    known = move.state.failure
    if known is not None and known.step <= body.step:
        return
    failure = ScriptFailure(
        rank=body.rank,
        step=body.step,
        error=body.error,
        text=body.text,
        machine=worker.machine,
        deadline=known.deadline
        if known is not None
        else move.in_(move.state.config.failure_grace_s),
    )
    move.state = replace(move.state, failure=failure)
    move.because(f"rank {body.rank} raised {body.error}")


def check_failure(move: Move) -> None:
    """End the job for its script's exception once earlier ones had time to arrive."""
    failure = move.state.failure
    if failure is not None and move.now >= failure.deadline:
        text = f"rank {failure.rank} on {failure.machine}, step {failure.step}:\n{failure.text}"
        ending.stop(move, exits.SCRIPT_FAILED, text)


# --------------------------------------------------------------------------- silence


def check_silence(move: Move) -> None:
    """Machines and processes that have been silent or stopped for too long.

    Behind the loop nobody is replaced any more, but a machine that is silent is not waited for.
    """
    if isinstance(move.state.phase, Ending | Ended):
        return
    if _is_alone(move):
        limit_s = move.state.config.alone_timeout_s
        text = f"no agent was heard for {limit_s:g} s: they and their workers have given up by then"
        ending.stop(move, exits.NO_MACHINE, text)
        return
    if not isinstance(move.state.phase, Finishing | Completing):
        _check_stopped(move)
    for name in sorted(move.state.machines, key=lookup.natural_order):
        if _is_silent(move, name):
            machine_lost(move, name)


def _is_alone(move: Move) -> bool:
    """Whether nobody is left that this controller could be cut off from."""
    state = move.state
    if isinstance(state.phase, Forming) or not state.machines:
        return False  # a start has its own limit
    newest = max(machine.heard_at for machine in state.machines.values())
    return move.has_waited(newest, state.config.alone_timeout_s)


def _check_stopped(move: Move) -> None:
    limit = move.state.config.stopped_limit_s
    for name in sorted(move.state.workers, key=lookup.natural_order):
        worker = move.state.workers[name]
        if worker.role in {"member", "standby"} and pool.is_stopped(move, worker):
            worker_ended_by_us(move, name, f"its process was stopped for {limit:g} s")


def _is_silent(move: Move, name: str) -> bool:
    state = move.state
    machine = state.machines[name]
    limit = seconds(state.config.lost_after_s)
    if machine.is_lost or move.now < after(machine.heard_at, limit):
        return False
    if not lookup.ranks_on(state.membership, name):
        return True
    if isinstance(state.phase, Training) and move.now < after(state.progress_at, limit):
        return False  # passed gates prove that every rank lives
    others = [m for other, m in sorted(state.machines.items()) if other != name]
    # Nobody heard at all: more likely we are the one who is cut off.
    return not others or any(move.now < after(other.heard_at, limit) for other in others)


def machine_lost(move: Move, name: str) -> None:
    """A machine is silent: whatever it plays is lost until it says hello."""
    limit = move.state.config.lost_after_s
    evidence = f"{name} was silent for {limit:g} s"
    machine = move.state.machines[name]
    move.keep_machine(replace(machine, is_lost=True, reason="its agent is silent"))
    move.because(evidence)
    shelf.on_machine_lost(move, name)
    for worker in lookup.workers_on(move.state, name):
        participant_lost(move, worker.incarnation, evidence)
