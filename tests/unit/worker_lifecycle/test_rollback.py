"""Roll-back plans: every member, wherever it stands, loads a snapshot and goes on from there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.worker_lifecycle.stories import (
    ME,
    VECTOR,
    Worker,
    a_plan,
    asked,
    edge,
    sent,
    vector_with,
)

from trainmover.protocol import exits, flags
from trainmover.protocol.messages import (
    Abort,
    Commit,
    Done,
    Freeze,
    Held,
    Plan,
    PlanIssued,
    Report,
    Source,
    TakeSnapshot,
    Version,
)
from trainmover.worker.events import (
    AbortGeneration,
    BoundaryReached,
    ChannelBroken,
    CommitGeneration,
    ContributeGate,
    CutOver,
    EnterMain,
    GateCompleted,
    GateRequested,
    PersonalReceived,
    Proceed,
    StopWorker,
    UndoStep,
)
from trainmover.worker.lifecycle_state import (
    Accepted,
    Bound,
    Finished,
    HeldInGate,
    RunningOut,
    Tail,
)

OTHERS = (ME, "m9.0.b", "m2.0.a", "m3.0.a")
LOSS = ChannelBroken(generation=1, edge=edge("m1.0.a"))
S = Version(step=1, lineage=1)


def rollback(number: int, **more: object) -> Plan:
    sources = tuple(
        Source(
            rank=rank,
            bulk_from="",
            own_from="",
            shared_from="",
            kind="snapshot",
            machine=f"m{rank}",
            host="h",
            port=7,
        )
        for rank in range(4)
    )
    known = {"target": S, "joiners": ("m9.0.b",), "sources": sources, "is_rollback": True}
    return a_plan(number, OTHERS, **(known | more))


def trained(steps: int = 3) -> Worker:
    worker = Worker().form()
    for step in range(steps):
        worker.do_step(step)
    return worker


def running_out() -> Worker:
    worker = trained()
    worker.feed(LOSS)
    return worker


def ready() -> Worker:
    worker = trained()
    worker.feed(GateRequested(step=3, kind=flags.STEP, flags=VECTOR))
    worker.feed(LOSS)
    return worker


def held() -> Worker:
    worker = trained()
    worker.enter_gate(3)
    worker.feed(LOSS)
    assert isinstance(worker.state.main, HeldInGate)
    return worker


def in_tail() -> Worker:
    worker = trained()
    worker.enter_gate(3)
    worker.pass_gate(3)
    worker.feed(LOSS)
    assert isinstance(worker.state.main, Tail)
    return worker


def at_boundary() -> Worker:
    worker = running_out()
    worker.feed(BoundaryReached(step=3, attempts=4))
    return worker


def finished() -> Worker:
    worker = trained()
    worker.feed(GateRequested(step=3, kind=flags.FINISH, flags=VECTOR))
    worker.feed(GateCompleted(generation=1, step=3, kind=flags.FINISH, vector=VECTOR))
    assert isinstance(worker.state.main, Finished)
    return worker


def stopped_by_request() -> Worker:
    worker = trained(2)
    worker.enter_gate(2)
    worker.pass_gate(2, vector=vector_with(stop=1))
    worker.feed(BoundaryReached(step=3, attempts=3))
    assert isinstance(worker.state.main, Finished)
    return worker


PLACES: dict[str, tuple[Callable[[], Worker], int | None]] = {
    "running out": (running_out, 3),
    "ready": (ready, 3),
    "held": (held, 3),
    "tail": (in_tail, 4),
    "boundary": (at_boundary, None),
    "finished": (finished, 3),
    "stopped": (stopped_by_request, None),
}
"""How to get there, and the boundary that `main` comes to before it can load; None: is there."""


@pytest.mark.parametrize("place", PLACES)
def test_a_member_loads_from_wherever_it_stands(place: str) -> None:
    build, boundary = PLACES[place]
    worker = build()
    worker.feed(Freeze(term=1, number=2))
    plan = rollback(2)
    commands = worker.feed(PlanIssued(term=1, plan=plan))
    if boundary is not None:
        assert asked(commands, CutOver) is None
        commands = worker.feed(BoundaryReached(step=boundary, attempts=5))
    assert asked(commands, CutOver) == CutOver(plan=plan)
    done = sent(worker.cut_over_done(plan), Done)
    assert done is not None and done.version == S
    commands = worker.feed(Commit(term=1, number=2))
    assert asked(commands, CommitGeneration) == CommitGeneration(number=2, target_step=1)
    assert asked(commands, Proceed) == Proceed(step=1)
    assert worker.state.applied == S and worker.state.last_result == ()
    assert worker.state.broken_state == "" and not worker.state.is_half_rolled_back


@pytest.mark.parametrize("place", ["ready", "held", "finished"])
def test_a_step_under_way_is_undone_first(place: str) -> None:
    build, _ = PLACES[place]
    worker = build()
    commands = worker.feed(Freeze(term=1, number=2))
    commands += worker.feed(PlanIssued(term=1, plan=rollback(2)))
    assert asked(commands, UndoStep) == UndoStep(step=3) or place == "ready"
    assert isinstance(worker.state.main, RunningOut)


def test_a_plan_that_is_no_rollback_still_has_to_name_this_boundary() -> None:
    worker = at_boundary()
    worker.feed(Freeze(term=1, number=2))
    plan = rollback(2, is_rollback=False)
    stopped = asked(worker.feed(PlanIssued(term=1, plan=plan)), StopWorker)
    assert stopped is not None and stopped.code == exits.PROTOCOL_FAILED


def test_steps_behind_the_target_pass_gates_again() -> None:
    worker = at_boundary()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    worker.cut_over_done(rollback(2))
    worker.feed(Commit(term=1, number=2))
    worker.hold_wards(2, lineage=2)
    commands = worker.feed(GateRequested(step=1, kind=flags.STEP, flags=VECTOR))
    assert asked(commands, ContributeGate) is not None
    worker.pass_gate(1, generation=2)
    worker.feed(BoundaryReached(step=2, attempts=6))
    assert worker.state.applied == Version(step=2, lineage=2)


def test_personal_state_of_the_target_is_taken_and_newer_one_dropped() -> None:
    worker = at_boundary()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    held = Held(owner_rank=2, version=S, is_final=True)
    worker.feed(PersonalReceived(held=held))
    worker.cut_over_done(rollback(2))
    worker.feed(Commit(term=1, number=2))
    assert worker.state.personal == (held,)


def test_a_rollback_that_is_aborted_leaves_a_state_for_another_one_only() -> None:
    worker = at_boundary()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    commands = worker.feed(Abort(term=1, number=2))
    assert asked(commands, AbortGeneration) == AbortGeneration(number=2, back_to=0)
    assert asked(commands, Proceed) is None
    report = sent(worker.feed(Freeze(term=1, number=3)), Report)
    assert report is not None and report.is_half_rolled_back
    assert report.broken_state == "half rolled back to step 1"
    plan = rollback(3)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)
    worker.cut_over_done(plan)
    assert asked(worker.feed(Commit(term=1, number=3)), Proceed) == Proceed(step=1)


def test_half_rolled_back_no_other_plan_is_carried_out() -> None:
    worker = at_boundary()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    worker.feed(Abort(term=1, number=2))
    worker.feed(Freeze(term=1, number=3))
    plan = rollback(3, is_rollback=False, target=Version(step=3, lineage=1))
    stopped = asked(worker.feed(PlanIssued(term=1, plan=plan)), StopWorker)
    assert stopped is not None and "half rolled back" in stopped.reason


def test_a_held_rank_that_has_undone_for_an_aborted_rollback_says_so() -> None:
    worker = held()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    worker.feed(BoundaryReached(step=3, attempts=5))
    report = sent(worker.feed(Freeze(term=1, number=3)), Report)
    assert report is not None and report.is_half_rolled_back and not report.has_entered


def test_prepared_and_committed_by_the_next_plan_is_whole_again() -> None:
    worker = at_boundary()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    worker.cut_over_done(rollback(2))
    report = sent(worker.feed(Freeze(term=1, number=3)), Report)
    assert report is not None and report.prepared_number == 2 and report.is_half_rolled_back
    plan = rollback(3, base_generation=2, is_rollback=False)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)
    assert worker.state.applied == S and not worker.state.is_half_rolled_back


def test_a_joiner_loads_like_everyone_else() -> None:
    worker = Worker("m9.0.b")
    worker.feed(Freeze(term=1, number=2))
    plan = rollback(2, attempts=4)
    commands = worker.feed(PlanIssued(term=1, plan=plan))
    assert asked(commands, EnterMain) == EnterMain(
        rank=1, world_size=4, is_loopback=True, attempts=4, version=plan.target.step
    )
    commands = worker.feed(BoundaryReached(step=0, attempts=4))
    assert asked(commands, CutOver) == CutOver(plan=plan)


def test_a_freeze_drops_a_rollback_that_waits_for_the_boundary() -> None:
    worker = in_tail()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=rollback(2)))
    assert isinstance(worker.state.switch, Accepted)
    worker.feed(Freeze(term=1, number=3))
    commands = worker.feed(BoundaryReached(step=4, attempts=5))
    assert asked(commands, CutOver) is None and isinstance(worker.state.main, Bound)
    report = sent(commands, Report)
    assert report is not None and report.is_half_rolled_back


# --------------------------------------------------------------------------- TakeSnapshot


def wanted(commands: tuple[object, ...]) -> int:
    gate = asked(commands, ContributeGate)  # type: ignore[arg-type]
    assert gate is not None
    return gate.flags[flags.SNAPSHOT]


def asking(level: int) -> tuple[int, ...]:
    vector = list(VECTOR)
    vector[flags.SNAPSHOT] = level
    return tuple(vector)


def test_a_snapshot_that_is_wanted_rides_on_the_next_gate_once() -> None:
    worker = trained(1)
    worker.feed(TakeSnapshot(term=1, level=2))
    assert wanted(worker.enter_gate(1)) == 2
    worker.pass_gate(1, vector=asking(2))
    worker.feed(BoundaryReached(step=2, attempts=2))
    assert wanted(worker.enter_gate(2)) == 0


def test_the_higher_level_rides() -> None:
    worker = trained(1)
    worker.feed(TakeSnapshot(term=1, level=1))
    worker.hold_wards(2)
    gate = GateRequested(step=1, kind=flags.STEP, flags=asking(3))
    assert wanted(worker.feed(gate)) == 3


def test_a_snapshot_is_wanted_until_a_gate_has_passed_with_it() -> None:
    worker = trained(1)
    worker.enter_gate(1)
    worker.feed(TakeSnapshot(term=1, level=1))
    worker.pass_gate(1)
    worker.feed(BoundaryReached(step=2, attempts=2))
    assert wanted(worker.enter_gate(2)) == 1


def test_whoever_has_no_rank_takes_no_snapshot() -> None:
    worker = Worker("m9.0.b")
    assert worker.feed(TakeSnapshot(term=1, level=1)) == ()
    assert worker.state.snapshot_wanted == 0
