"""Machines and their workers: who is there, what is launched, who is ready as a standby.

Decides which slots get a worker and what a standby builds itself as. Does not decide what the
loss of a worker means for the job (losses) nor who replaces whom (seats, switchover).
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import classes, lookup, pace
from trainmover.controller.move import Move
from trainmover.controller.state import Forming, Gathering, Machine, Worker
from trainmover.protocol import exits
from trainmover.protocol.journal import MachineRetired
from trainmover.protocol.messages import (
    AgentHello,
    BecomeStandby,
    Facts,
    KillWorker,
    LaunchWorkers,
    Refused,
    StandbyFailed,
    StandbyReady,
    StopAgent,
    Welcome,
    WorkerLaunch,
    WorkerStatus,
    WorkerUp,
)
from trainmover.units import after, seconds

LEFT = "has left the job"

# --------------------------------------------------------------------------- machines


def on_hello(move: Move, hello: AgentHello) -> None:
    """An agent registers, for the first time or again."""
    known = move.state.machines.get(hello.machine)
    machine = known or Machine(name=hello.machine, heard_at=move.now)
    if machine.reason == LEFT and machine.agent != hello.incarnation:
        machine = replace(machine, is_retired=False, reason="")  # it comes back as a new one
    machine = replace(
        machine,
        agent=hello.incarnation,
        is_linked=True,
        unlinked_at=None,
        is_lost=False,
        heard_at=move.now,
        facts=hello.facts,
        is_leaving=machine.is_leaving and machine.agent == hello.incarnation,
    )
    move.keep_machine(machine)
    expected = move.state.facts
    unequal = lookup.difference(expected, hello.facts) if expected is not None else ""
    if unequal and not lookup.ranks_on(move.state.membership, hello.machine):
        retire(move, hello.machine, f"{hello.machine} differs from the job's machines: {unequal}")
    if move.state.machines[hello.machine].is_retired:
        _send_refusal(move, hello.machine)
        return
    move.send(hello.machine, Welcome(term=move.state.term, spec=move.state.spec))
    move.because(f"{hello.machine} registered")
    for status in hello.workers:
        _meet(move, hello.machine, status)
    # What was said while the link was down is said again at once.
    move.state = replace(move.state, resend_at=move.now)


def refuse(move: Move, machine: str, reason: str) -> None:
    """Turn a registered machine away."""
    retire(move, machine, reason)
    _send_refusal(move, machine)


def _send_refusal(move: Move, machine: str) -> None:
    known = move.state.machines[machine]
    code = exits.COMPLETED if known.reason == LEFT else exits.INCOMPATIBLE
    move.send(machine, Refused(term=move.state.term, reason=known.reason, code=code))


def _meet(move: Move, machine: str, status: WorkerStatus) -> None:
    name = status.incarnation
    if name in move.state.workers:
        return
    worker = Worker(
        incarnation=name,
        machine=machine,
        local_rank=status.local_rank,
        launched_at=move.now,
        status=status,
    )
    if name in move.state.retired:
        # Replaced while it was away: it may touch nothing (P7).
        worker = replace(worker, role="ending", ending_since=move.now, reason="replaced")
    move.keep_worker(worker)
    if worker.role == "ending":
        order_end(move, worker)


def retire(move: Move, machine: str, reason: str) -> None:
    """Never use a machine again."""
    known = move.state.machines[machine]
    if not known.is_retired:
        move.append(MachineRetired(machine=machine, reason=reason))
        move.keep_machine(replace(known, is_retired=True, reason=reason))
        move.because(reason)


def let_go(move: Move) -> None:
    """Agents that were asked to leave and have no rank (any more) may end."""
    for name in sorted(move.state.machines, key=lookup.natural_order):
        machine = move.state.machines[name]
        if not machine.is_leaving or not machine.is_linked:
            continue
        serves = [w for w in lookup.workers_on(move.state, name) if w.role in {"member", "leaver"}]
        if not serves and not lookup.ranks_on(move.state.membership, name):
            _send_off(move, machine)


def _send_off(move: Move, machine: Machine) -> None:
    reason = f"{machine.name} has left the job"
    move.send(machine.name, StopAgent(term=move.state.term, code=exits.COMPLETED, reason=reason))
    move.keep_machine(replace(machine, is_leaving=False, is_retired=True, reason=LEFT))


def dismiss(move: Move, name: str) -> None:
    """A machine whose workers have left for good is given back."""
    machine = move.state.machines.get(name)
    keeps = [w for w in lookup.workers_on(move.state, name) if w.role != "ending"]
    if machine is None or keeps or lookup.ranks_on(move.state.membership, name):
        return
    _send_off(move, machine)


# --------------------------------------------------------------------------- launching


def launch(move: Move, machine: str, local_rank: int) -> Worker:
    """Start a worker; repeated until the agent has shown it alive."""
    worker = Worker(
        incarnation=move.next_incarnation(machine, local_rank),
        machine=machine,
        local_rank=local_rank,
        launched_at=move.now,
    )
    move.keep_worker(worker)
    order_launch(move, worker)
    return worker


def order_launch(move: Move, worker: Worker) -> None:
    """The order itself, first or again."""
    launch_ = WorkerLaunch(
        incarnation=worker.incarnation, local_rank=worker.local_rank, machine=worker.machine
    )
    move.send(worker.machine, LaunchWorkers(term=move.state.term, launches=(launch_,)))


def refill(move: Move) -> None:
    """A worker for every free slot of every usable machine: tomorrow's standbys."""
    if isinstance(move.state.phase, Forming) and not move.state.phase.active:
        return
    for machine in lookup.usable_machines(move.state):
        if machine.launch_failures >= move.state.config.max_tries:
            continue
        taken = {worker.local_rank for worker in lookup.workers_on(move.state, machine.name)}
        for local_rank in range(move.state.spec.workers_per_machine):
            if local_rank not in taken and not _is_spoken_for(move, machine.name, local_rank):
                launch(move, machine.name, local_rank)
                move.because(f"launch a worker on {machine.name}")


def _is_spoken_for(move: Move, machine: str, local_rank: int) -> bool:
    """A member whose process we have not met in this term has the slot."""
    return any(
        member.machine == machine and lookup.local_rank_of(move.state, member.rank) == local_rank
        for member in lookup.members(move.state)
        if member.incarnation not in move.state.retired
    )


def on_launch_failed(move: Move, worker: Worker, reason: str) -> None:
    """Count it: a machine that can't start workers is not tried for ever."""
    machine = move.state.machines[worker.machine]
    failures = machine.launch_failures + 1
    move.keep_machine(replace(machine, launch_failures=failures, reason=reason))


# --------------------------------------------------------------------------- standbys


def on_up(move: Move, worker: Worker, body: WorkerUp) -> None:
    """A worker's channels listen."""
    worker = replace(worker, host=body.host, port=body.port, facts=body.facts)
    expected = _worker_facts(move)
    unequal = lookup.difference(expected, body.facts) if expected is not None else ""
    if unequal and worker.role in {"starting", "standby"}:
        worker = replace(worker, reason=f"differs from the job's workers: {unequal}")
        move.because(f"{worker.incarnation} {worker.reason}")
    move.keep_worker(worker)
    if worker.role == "starting" and not _is_founder(move, worker):
        become_standby(move, worker)


def _worker_facts(move: Move) -> Facts | None:
    for name in lookup.member_names(move.state):
        worker = move.state.workers.get(name)
        if worker is not None and worker.facts.must_equal:
            return worker.facts
    return None


def _is_founder(move: Move, worker: Worker) -> bool:
    phase = move.state.phase
    return isinstance(phase, Forming) and worker.machine in phase.active


def become_standby(move: Move, worker: Worker) -> None:
    """Build `main` as the rank it is likely to take, once its first iterations are known."""
    worker = replace(worker, role="standby", as_rank=_likely_rank(move, worker))
    move.keep_worker(worker)
    if not worker.reason:
        order_standby(move, worker)
        order_waiting(move)  # those of its machine that have waited for it


def _likely_rank(move: Move, worker: Worker) -> int:
    """The rank it has a seat for, or whose worker has just ended in its place, or any."""
    if isinstance(move.state.phase, Gathering):
        for seat in move.state.phase.seats:
            if seat.incarnation == worker.incarnation:
                return seat.rank
    for member in lookup.members(move.state):
        is_same_place = (
            member.machine == worker.machine
            and lookup.local_rank_of(move.state, member.rank) == worker.local_rank
        )
        if is_same_place and member.incarnation not in move.state.workers:
            return member.rank
    return worker.local_rank


def order_standby(move: Move, worker: Worker) -> None:
    """The order itself, first or again."""
    if not (move.state.config.do_standbys_rehearse or isinstance(move.state.phase, Gathering)):
        return  # the ablation's standby: a started process until there is a loss
    rehearsals = worker.rehearsals
    if rehearsals is None:
        rehearsals = classes.choose(move, worker)
        if rehearsals is None:
            return  # the first iterations are about to be known
        as_rank = rehearsals[-1].as_rank if rehearsals else worker.as_rank
        worker = replace(
            worker,
            rehearsals=rehearsals,
            as_rank=as_rank,
            ordered_at=move.now,
            calm_step_s=pace.calm_step_s(move.state),
        )
        move.keep_worker(worker)
    body = BecomeStandby(
        term=move.state.term,
        as_rank=worker.as_rank,
        world_size=move.state.spec.world_size,
        rehearsals=rehearsals,
    )
    move.tell(worker.incarnation, body)


def order_waiting(move: Move) -> None:
    """Standbys that have waited for recordings begin, if what they wait for is there (or over)."""
    for worker in lookup.standbys(move.state):
        if worker.rehearsals is None and worker.readiness is None and not worker.reason:
            order_standby(move, worker)


def on_ready(move: Move, worker: Worker, body: StandbyReady) -> None:
    """A standby has built `main` and waits."""
    if worker.role not in {"starting", "standby"}:
        return
    if worker.readiness == body:
        return  # said again
    ready_at = worker.ready_at or move.now
    worker = replace(worker, role="standby", as_rank=body.as_rank, readiness=body)
    move.keep_worker(replace(worker, ready_at=ready_at))
    machine = move.state.machines[worker.machine]
    move.keep_machine(replace(machine, launch_failures=0, reason=""))
    move.because(f"{worker.incarnation} is ready as a standby of rank {body.as_rank}")
    slowdown = pace.slowdown(move.state, worker)
    if slowdown:
        move.because(f"a step took {slowdown:.2f} times as long while it rehearsed")


def on_not_ready(move: Move, worker: Worker, body: StandbyFailed) -> None:
    """A standby can't build `main`: end it; its slot is filled again a few times."""
    if worker.role not in {"starting", "standby"}:
        return
    on_launch_failed(move, worker, body.reason)
    end(move, worker.incarnation, f"can't be a standby: {body.reason}")


# --------------------------------------------------------------------------- ends


def end(move: Move, incarnation: str, reason: str) -> None:
    """Kill a worker: its exit is awaited and the order repeated until then."""
    worker = move.state.workers.get(incarnation)
    if worker is None or worker.role == "ending":
        return
    worker = replace(worker, role="ending", reason=reason, ending_since=move.now, released_number=0)
    move.keep_worker(worker)
    order_end(move, worker)
    move.because(f"end {incarnation}: {reason}")


def order_end(move: Move, worker: Worker) -> None:
    """The order itself, first or again."""
    body = KillWorker(term=move.state.term, incarnation=worker.incarnation, reason=worker.reason)
    move.send(worker.machine, body)


# --------------------------------------------------------------------------- heartbeats


def on_statuses(move: Move, machine: str, statuses: tuple[WorkerStatus, ...]) -> tuple[str, ...]:
    """What a heartbeat says of workers; returns those that have vanished for too long."""
    seen = {status.incarnation: status for status in statuses}
    for status in statuses:
        _meet(move, machine, status)
    vanished: list[str] = []
    for worker in lookup.workers_on(move.state, machine):
        latest = seen.get(worker.incarnation)
        if latest is not None:
            _keep_status(move, worker, latest)
        elif (worker.status is not None or worker.is_up) and _is_missing(move, worker):
            vanished.append(worker.incarnation)
    return tuple(vanished)


def _keep_status(move: Move, worker: Worker, status: WorkerStatus) -> None:
    stopped_since = worker.stopped_since
    if status.process_state != "T":
        stopped_since = None
    elif stopped_since is None:
        stopped_since = move.now
    move.keep_worker(
        replace(worker, status=status, missing_since=None, stopped_since=stopped_since)
    )
    state = move.state
    if worker.role == "member" and status.generation == state.generation:
        move.state = replace(state, step=max(state.step, status.step))
        if status.gate > state.progress_gate:
            move.state = replace(move.state, progress_gate=status.gate, progress_at=move.now)
            pace.on_gate(move, status.gate)


def _is_missing(move: Move, worker: Worker) -> bool:
    if worker.missing_since is None:
        move.keep_worker(replace(worker, missing_since=move.now))
        return False
    return move.has_waited(worker.missing_since, move.state.config.missing_after_s)


def is_stopped(move: Move, worker: Worker) -> bool:
    """Whether the operating system has held the process for longer than is tolerated."""
    limit = seconds(move.state.config.stopped_limit_s)
    return worker.stopped_since is not None and move.now >= after(worker.stopped_since, limit)
