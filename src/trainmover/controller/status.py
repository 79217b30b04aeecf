"""What a person is shown: one view of the state, made of plain values. Decides only the wording."""

from __future__ import annotations

from typing import Any, Literal, assert_never

import msgspec

from trainmover.controller import classes, lookup, pace, placing, shelf
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
    State,
    Switching,
    Training,
    Worker,
)
from trainmover.protocol.journal import IncidentReport
from trainmover.protocol.messages import Version
from trainmover.units import Instant, in_seconds

Word = Literal[
    "starting", "running", "degraded", "recovering", "reallocating", "finishing", "stopped"
]


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """Who plays a rank and where it is."""

    rank: int
    machine: str
    incarnation: str
    step: int
    phase: str
    is_alive: bool


class StandbyView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker without a rank."""

    machine: str
    incarnation: str
    local_rank: int
    is_ready: bool
    as_rank: int
    reason: str
    """Why it is not ready, or why it would enter `main` again."""
    seconds: float
    classes: tuple[str, ...] = ()
    """Role classes it has rehearsed, the one it is built as last."""
    answers: str = ""
    """How crossing collectives were answered meanwhile: recorded, loopback or zeros."""
    not_rehearsed: tuple[str, ...] = ()
    """Role classes it has not rehearsed; what it does first as one of them it does for the first
    time."""
    slowdown: float = 0.0
    """The job's median step while it rehearsed over that while nobody did; 0: not known."""


class ClassView(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that a standby rehearses as one."""

    digest: str
    ranks: tuple[int, ...]
    recording: str
    """File of its recording, or why there is none."""
    bytes: int


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and what it is for."""

    name: str
    role: Literal["active", "standby", "lost", "retired", "leaving"]
    is_linked: bool
    ranks: tuple[int, ...]
    reason: str


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `trainmover status`."""

    job: str
    run_id: str
    word: Word
    phase: str
    """What exactly is waited for."""
    generation: int
    step: int
    term: int
    world_size: int
    ranks: tuple[RankView, ...]
    standbys: tuple[StandbyView, ...]
    classes: tuple[ClassView, ...]
    machines: tuple[MachineView, ...]
    incident_count: int
    max_incidents: int
    incidents: tuple[IncidentReport, ...]
    open_incident: str
    exit_code: int | None
    reason: str
    snapshot_step: int = -1
    """Step of the newest snapshot that is complete in agents' memory; -1: none."""
    snapshot_copied_step: int = -1
    """Step of the newest one of which every copy is where it should be; -1: none."""
    snapshot_count: int = 0
    """How many versions agents hold, complete or not."""
    snapshot_copies: str = ""
    """Why its copies are not all where they should be; empty: they are."""
    snapshot_survival: tuple[float, ...] = ()
    """Chance that the copies survive one, two, three machines that are lost at once."""
    snapshot_fatal: tuple[str, ...] = ()
    """Fault domains whose loss as a whole they would not survive, as `rack r1`."""
    snapshot_worth: str = ""
    """Both in words."""
    checkpoint_step: int = -1
    """Step of the newest durable checkpoint; -1: none."""
    checkpoint_name: str = ""
    checkpoint_age_s: float = -1.0
    """Since it was made durable; -1: not in this controller's life."""
    checkpoint_state: str = ""
    """What is being written, or why the latest one failed."""
    disk_step: int = -1
    """Step of the newest checkpoint on machines' own disks; -1: none."""
    disk_failure: str = ""
    """Why the latest one could not be written there; empty: it could, or need not be."""


def status(state: State, now: Instant) -> StatusView:
    """The view of `state`."""
    code, reason = None, ""
    if isinstance(state.phase, Ending | Ended):
        code, reason = state.phase.code, state.phase.reason
    return StatusView(
        job=state.spec.job,
        run_id=state.spec.run_id,
        word=word(state),
        phase=describe(state, now),
        generation=state.generation,
        step=lookup.known_step(state),
        term=state.term,
        world_size=state.spec.world_size,
        ranks=tuple(_rank(state, rank) for rank in range(len(lookup.members(state)))),
        standbys=tuple(_standby(state, w) for w in _without_rank(state)),
        classes=_classes(state),
        machines=tuple(_machine(state, name) for name in _machine_names(state)),
        incident_count=state.incident_count,
        max_incidents=state.config.max_incidents,
        incidents=state.closed,
        open_incident=state.incident.reason if state.incident is not None else "",
        exit_code=code,
        reason=reason,
        **_kept(state, now),
    )


def _kept(state: State, now: Instant) -> dict[str, Any]:
    kept = state.kept
    complete, durable = shelf.complete_versions(state), kept.durable
    at = durable.at if durable is not None else None
    doing = kept.failure
    if kept.writing is not None:
        version = kept.writing.version
        how = "copied from machines' disks" if kept.writing.is_copy else "written"
        doing = f"checkpoint {kept.writing.number} of step {version.step} is being {how}"
    return {
        "snapshot_step": complete[0].step if complete else -1,
        "snapshot_copied_step": _copied_step(state, complete),
        "snapshot_count": len(
            {held.version for one in shelf.reachable(state).values() for held in one.held}
        ),
        "snapshot_copies": "; ".join(kept.reasons),
        "snapshot_survival": kept.survival,
        "snapshot_fatal": kept.fatal,
        "snapshot_worth": placing.worth_text(kept.survival, kept.fatal),
        "checkpoint_step": durable.version.step if durable is not None else -1,
        "checkpoint_name": durable.name if durable is not None else "",
        "checkpoint_age_s": in_seconds(now - at) if at is not None else -1.0,
        "checkpoint_state": doing,
        "disk_step": kept.on_disk.version.step if kept.on_disk is not None else -1,
        "disk_failure": kept.disk_failure,
    }


def _copied_step(state: State, complete: tuple[Version, ...]) -> int:
    if not state.kept.places:
        return -1
    copied = (each for each in complete if not shelf.lacks_copies(state, each))
    return next((version.step for version in copied), -1)


def word(state: State) -> Word:
    """The state a person can follow (D1)."""
    match state.phase:
        case Forming():
            return "starting"
        case Training():
            ready = [w for w in lookup.standbys(state) if lookup.is_ready(w)]
            is_short = len(ready) < state.config.standby_machines * state.spec.workers_per_machine
            return "degraded" if is_short else "running"
        case Preparing() | Flagged():
            return "reallocating"
        case Switching(plan=plan):
            words: dict[str, Word] = {"form": "starting", "planned": "reallocating"}
            return words.get(plan.kind, "recovering")
        case Freezing() | Gathering():
            return "recovering"
        case Finishing() | Completing():
            return "finishing"
        case Ending() | Ended():
            return "stopped"
        case _ as never:
            assert_never(never)


def describe(state: State, now: Instant) -> str:
    """What is waited for, in one clause."""
    phase = state.phase
    match phase:
        case Forming(active=active):
            count = len(lookup.usable_machines(state))
            wanted = lookup.machine_count(state)
            return "workers start" if active else f"{count} of {wanted} machines registered"
        case Training():
            if phase.untracked:
                return f"{len(phase.untracked)} ranks build main"
            return "training"
        case Preparing():
            return f"prepare {phase.plan.number}: waits for {', '.join(phase.waiting)}"
        case Flagged():
            return f"switchover {phase.plan.number}: waits for the boundary"
        case Switching():
            silent = [n for n in lookup.participants(phase.plan) if n not in phase.dones]
            return f"cut-over to {phase.plan.number}: waits for {', '.join(silent)}"
        case Freezing():
            return f"freeze {phase.number}: {len(phase.reports)} reports"
        case Gathering():
            seats = ", ".join(f"rank {s.rank} ({s.way})" for s in phase.seats)
            waited = in_seconds(now - phase.since)
            return f"recovery {phase.number}: joiners for {seats}, since {waited:.1f} s"
        case Finishing():
            return f"{len(phase.passed)} ranks have passed the finish gate"
        case Completing():
            return "complete; workers end"
        case Ending() | Ended():
            return phase.reason
        case _ as never:
            assert_never(never)


def _rank(state: State, rank: int) -> RankView:
    member = lookup.members(state)[rank]
    worker = state.workers.get(member.incarnation)
    seen = worker.status if worker is not None else None
    return RankView(
        rank=rank,
        machine=member.machine,
        incarnation=member.incarnation,
        step=seen.step if seen is not None else -1,
        phase=seen.phase if seen is not None else "",
        is_alive=worker is not None and worker.role == "member",
    )


def _without_rank(state: State) -> tuple[Worker, ...]:
    names = sorted(state.workers, key=lookup.natural_order)
    found = [state.workers[name] for name in names]
    return tuple(worker for worker in found if worker.role in {"starting", "standby"})


def _standby(state: State, worker: Worker) -> StandbyView:
    readiness = worker.readiness
    reason = worker.reason
    if not reason and readiness is None:
        reason = "builds main" if worker.role == "standby" else "starts"
        if worker.role == "standby" and worker.rehearsals is None:
            reason = "waits for the first iterations to be recorded"
    elif not reason and readiness is not None:
        reason = readiness.reason
    return StandbyView(
        machine=worker.machine,
        incarnation=worker.incarnation,
        local_rank=worker.local_rank,
        is_ready=lookup.is_ready(worker),
        as_rank=worker.as_rank,
        reason=reason,
        seconds=readiness.seconds if readiness is not None else 0.0,
        classes=readiness.classes if readiness is not None else (),
        answers=readiness.answers if readiness is not None else "",
        not_rehearsed=classes.not_rehearsed(state, worker),
        slowdown=pace.slowdown(state, worker),
    )


def _classes(state: State) -> tuple[ClassView, ...]:
    views = []
    for digest, ranks in classes.groups(state).items():
        stored = state.classes.stored.get(digest)
        where = "not stored yet" if stored is None else stored.reason or stored.file
        size = 0 if stored is None else stored.bytes
        views.append(ClassView(digest=digest, ranks=ranks, recording=where, bytes=size))
    return tuple(views)


def _machine_names(state: State) -> tuple[str, ...]:
    return tuple(sorted(state.machines, key=lookup.natural_order))


def _machine(state: State, name: str) -> MachineView:
    machine = state.machines[name]
    ranks = lookup.ranks_on(state.membership, name)
    role: Literal["active", "standby", "lost", "retired", "leaving"]
    if machine.is_retired:
        role = "retired"
    elif machine.is_lost:
        role = "lost"
    elif machine.is_leaving:
        role = "leaving"
    else:
        role = "active" if ranks else "standby"
    return MachineView(
        name=name, role=role, is_linked=machine.is_linked, ranks=ranks, reason=machine.reason
    )
