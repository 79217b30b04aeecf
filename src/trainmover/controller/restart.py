"""A controller's life begins: from an empty journal, or from what another life has written.

Decides how open numbers end (C1): a plan with a target is sent again unchanged, anything else is
aborted under its number. Nobody is declared lost before the heartbeat limit has passed once (C5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainmover.controller import finishing, plans, recovery, shelf
from trainmover.controller.config import Config
from trainmover.controller.disks import start_of
from trainmover.controller.kept import Durable, Kept, Restored, TimeLine, Unchosen
from trainmover.controller.move import Move
from trainmover.controller.state import (
    Ending,
    Forming,
    Machine,
    State,
    Switching,
    Training,
    Transition,
    Worker,
)
from trainmover.controller.timers import on_due
from trainmover.protocol.journal import (
    AbortRecorded,
    AnyRecord,
    CheckpointBegun,
    CheckpointKept,
    CommitRecorded,
    CompleteRecorded,
    IdentitiesKnown,
    IncidentClosed,
    IncidentOpened,
    IncidentReport,
    JobOpened,
    MachineRetired,
    MachinesChosen,
    PlanRecorded,
    StartChosen,
    StoppedRecorded,
    StopRequested,
    TargetFixed,
)
from trainmover.protocol.messages import JobSpec, Plan
from trainmover.topology import Membership
from trainmover.topology.keeping import read_keeping
from trainmover.units import Instant, after, seconds


@dataclass(kw_only=True, slots=True)
class _Past:
    """What the journal says, gathered record by record."""

    plans: dict[int, Plan] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    chosen: MachinesChosen | None = None
    retired_machines: dict[str, str] = field(default_factory=dict)
    identities: tuple[str, ...] = ()
    closed: tuple[IncidentReport, ...] = ()
    incident_count: int = 0
    is_opened: bool = False
    is_stop_wanted: bool = False
    complete: CompleteRecorded | None = None
    stopped: StoppedRecorded | None = None
    checkpoint_number: int = 0
    durable: Durable | None = None
    on_disk: Durable | None = None
    start: StartChosen | None = None
    time_lines: tuple[TimeLine, ...] = ()
    fresh: Plan | None = None
    """Newest plan that entered `main` anew."""


def initial_state(
    config: Config,
    spec: JobSpec,
    records: Sequence[AnyRecord],
    term: int,
    now: Instant,
    restored: Restored | Unchosen | None = None,
) -> Transition:
    """First state of a controller's life and what it does first.

    Args:
        config: Time-outs and limits.
        spec: The job, as configured; the journal's one is the same job.
        records: All records of the journal, oldest first.
        term: Number of this life.
        now: The present instant.
        restored: What to start from, where that is known before agents are there; means nothing
            once a first generation has been planned.
    """
    past = _read(records)
    kept = _kept(spec, past, restored)
    state = State(
        config=config,
        spec=spec,
        term=term,
        phase=Forming(
            deadline=after(now, seconds(config.start_timeout_s)),
            active=past.chosen.machines if past.chosen is not None else (),
        ),
        facts=past.chosen.facts if past.chosen is not None else None,
        # Lineages of the checkpoint are numbers of another life of the job: never given again.
        highest_number=max([kept.base.lineage, *past.plans, *past.opened]),
        kept=kept,
        identities=past.identities,
        incident_count=past.incident_count,
        closed=past.closed,
        is_stop_wanted=past.is_stop_wanted,
        started_at=now,
        moved_at=now,
        resend_at=after(now, seconds(config.resend_interval_s)),
        progress_at=now,
    )
    move = Move(_with_machines(state, past, now), now)
    if not past.is_opened:
        move.append(JobOpened(spec=spec))
        move.because("a new job")
    if isinstance(restored, Restored) and not past.plans:
        move.append(start_of(restored))
    if past.committed:
        _resume_generation(move, past)
    _resume_phase(move, past)
    on_due(move)
    return move.done()


def _read(records: Sequence[AnyRecord]) -> _Past:
    past = _Past()
    for record in records:
        match record:
            case JobOpened():
                past.is_opened = True
            case PlanRecorded(plan=plan):
                past.plans[plan.number] = plan
            case TargetFixed(number=number, target=target):
                past.plans[number] = plans.with_target(past.plans[number], target)
            case CommitRecorded(number=number):
                past.committed.append(number)
                _read_commit(past, past.plans[number])
            case AbortRecorded(number=number):
                past.aborted.append(number)
            case IncidentOpened(number=number, reason=reason, is_counted=is_counted):
                past.opened[number] = reason
                past.incident_count += int(is_counted)
            case _:
                _read_other(past, record)
    return past


def _read_commit(past: _Past, plan: Plan) -> None:
    if plan.is_fresh_start:
        past.identities = ()
        past.fresh = plan
    if shelf.leaves_steps(plan):
        line = TimeLine(target=plan.target, number=plan.number)
        past.time_lines = (*past.time_lines, line)


def _kept(spec: JobSpec, past: _Past, restored: Restored | Unchosen | None) -> Kept:
    """Snapshots are told by agents again; all else is in the journal."""
    kept = Kept(
        keeping=read_keeping(spec.settings),
        is_relearning=bool(past.committed),
        time_lines=past.time_lines,
        number=past.checkpoint_number,
        durable=past.durable,
        on_disk=past.on_disk,
    )
    chosen = start_of(restored) if isinstance(restored, Restored) else None
    begun = past.start if past.plans else chosen
    if begun is not None:
        kept = replace(kept, begun_from=begun.run_id, begun_at=begun.version, history=begun.history)
    fresh = [plan for plan in past.plans.values() if plan.is_fresh_start]
    first = past.fresh or next(reversed(fresh), None)
    if first is not None:
        kept = replace(kept, base=first.target, restore=first.restore, restore_disks=first.disks)
    elif isinstance(restored, Restored):
        kept = replace(
            kept, base=restored.version, restore=restored.name, restore_disks=restored.disks
        )
    elif isinstance(restored, Unchosen):
        kept = replace(kept, is_start_open=kept.keeping.checkpoint.is_on)
    if kept.durable is None and kept.restore:
        durable = Durable(name=kept.restore, version=kept.base, disks=kept.restore_disks)
        kept = replace(kept, durable=durable)
    return kept


def _read_other(past: _Past, record: AnyRecord) -> None:
    match record:
        case MachinesChosen():
            past.chosen = record
        case MachineRetired(machine=machine, reason=reason):
            past.retired_machines[machine] = reason
        case IdentitiesKnown(identities=identities):
            past.identities = identities
        case IncidentClosed(report=report):
            past.closed = (*past.closed, report)[-100:]
        case CheckpointBegun(number=number):
            past.checkpoint_number = max(past.checkpoint_number, number)
        case CheckpointKept(tier="disk"):
            if not record.is_suspect:
                past.on_disk = _durable_of(record)
        case CheckpointKept():
            if past.durable is None or not record.is_suspect:
                past.durable = _durable_of(record)
        case StartChosen():
            past.start = record
        case StopRequested():
            past.is_stop_wanted = True
        case CompleteRecorded():
            past.complete = record
        case StoppedRecorded():
            past.stopped = record
        case _:
            pass  # TermTaken is the journal's own business; a missed checkpoint is for people


def _durable_of(record: CheckpointKept) -> Durable:
    return Durable(
        name=record.name, version=record.version, number=record.number, disks=record.disks
    )


def _with_machines(state: State, past: _Past, now: Instant) -> State:
    names = set(past.retired_machines)
    for number in (*past.committed[-1:], *_open_number(past)):
        plan = past.plans.get(number)
        names |= set(plan.membership.machines()) if plan is not None else set()
    machines = {
        name: Machine(
            name=name,
            heard_at=now,
            is_retired=name in past.retired_machines,
            reason=past.retired_machines.get(name, ""),
        )
        for name in sorted(names)
    }
    return replace(state, machines=machines)


def _open_number(past: _Past) -> tuple[int, ...]:
    numbers = sorted({*past.plans, *past.opened})
    done = {*past.committed, *past.aborted}
    return tuple(number for number in numbers if number not in done)[-1:]


def _meet_members(move: Move, membership: Membership, role: str) -> None:
    for member in membership.members:
        if member.incarnation in move.state.workers:
            continue
        worker = Worker(
            incarnation=member.incarnation,
            machine=member.machine,
            local_rank=member.rank % move.state.spec.workers_per_machine,
            launched_at=move.now,
            role="member" if role == "member" else "standby",
            host=member.host,
            port=member.port,
            as_rank=member.rank,
        )
        move.keep_worker(worker)


def _resume_generation(move: Move, past: _Past) -> None:
    plan = past.plans[past.committed[-1]]
    current = {member.incarnation for member in plan.membership.members}
    former = {
        member.incarnation
        for number in past.committed
        for member in past.plans[number].membership.members
    }
    move.state = replace(
        move.state,
        membership=plan.membership,
        target=plan.target,
        is_fresh=plan.is_fresh_start,
        retired=frozenset(former - current),
        step=max(plan.target.step, 0),
        progress_gate=plan.target.step - 1,
    )
    _meet_members(move, plan.membership, "member")
    if plan.kind == "planned":
        _meet_leavers(move, plan)
    names = tuple(member.incarnation for member in plan.membership.members)
    # Whether they have built `main` is known from their next gate.
    move.enter(Training(unacknowledged=names, committed_at=move.now))
    move.because(f"generation {plan.number} goes on")


def _meet_leavers(move: Move, plan: Plan) -> None:
    """Whoever made room keeps its state until a gate has been passed without it."""
    for member in plan.leaver_members:
        leaver = Worker(
            incarnation=member.incarnation,
            machine=member.machine,
            local_rank=member.rank % move.state.spec.workers_per_machine,
            launched_at=move.now,
            role="leaver",
            released_number=plan.number,
            host=member.host,
            port=member.port,
        )
        move.keep_worker(leaver)
        if member.machine not in move.state.machines:
            move.keep_machine(Machine(name=member.machine, heard_at=move.now))


def _resume_phase(move: Move, past: _Past) -> None:
    if past.stopped is not None:
        deadline = move.in_(move.state.config.stop_timeout_s)
        phase = Ending(
            code=past.stopped.code, reason=past.stopped.reason, told=(), deadline=deadline
        )
        move.enter(replace(phase, told=tuple(sorted(move.state.machines))))
        return
    if past.complete is not None:
        move.enter(finishing.completing(move, is_stopped=past.is_stop_wanted))
        return
    for number in _open_number(past):
        _resume_number(move, past, number)
    if past.is_stop_wanted:
        finishing.ask_to_stop(move)


def _resume_number(move: Move, past: _Past, number: int) -> None:
    plan = past.plans.get(number)
    if plan is None:
        reason = f"the controller was restarted: {past.opened[number]}"
        move.append(AbortRecorded(number=number, reason=reason))
        recovery.resume_incident(move, past.opened[number])
        return
    _meet_members(move, plan.membership, "joiner")
    if plan.kind == "planned" and plan.target.step < 0:
        plans.abort(move, plan, "the controller was restarted before the boundary was known")
        return
    # The very same plan: some may be prepared for it, or even know that it is committed.
    recovery.resume_record(move, plan)
    deadline = move.in_(move.state.config.cut_over_timeout_s)
    move.enter(Switching(plan=plan, deadline=deadline))
    move.because(f"plan {number} is sent again")
