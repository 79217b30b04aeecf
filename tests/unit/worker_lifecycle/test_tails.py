"""Behind the gate when a loss strikes: cut short, long, or over already."""

from __future__ import annotations

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
    Commit,
    Freeze,
    Held,
    InTail,
    Plan,
    PlanIssued,
    Report,
    Source,
    Version,
)
from trainmover.worker.events import (
    BoundaryReached,
    ChannelBroken,
    CutOver,
    GateRequested,
    Proceed,
    StopWorker,
    TailStruck,
    UndoStep,
)
from trainmover.worker.lifecycle_state import Bound, RunningOut

LOSS = ChannelBroken(generation=1, edge=edge("m1.0.a"))
OTHERS = (ME, "m9.0.b", "m2.0.a", "m3.0.a")


def back_to(step: int, number: int = 2) -> Plan:
    source = Source(rank=1, bulk_from=ME, own_from=ME, shared_from=ME, kind="replica")
    target = Version(step=step, lineage=1)
    return a_plan(number, OTHERS, target=target, joiners=("m9.0.b",), sources=(source,))


def behind(step: int) -> Worker:
    """Has passed the gate of `step` and kept what was in front of it."""
    worker = Worker(tail_timeout_s=60.0, run_out_timeout_s=5.0).form()
    for done in range(step):
        worker.do_step(done)
    worker.enter_gate(step)
    worker.pass_gate(step)
    return worker


def over(step: int) -> Worker:
    worker = behind(step)
    worker.feed(BoundaryReached(step=step + 1, attempts=step + 1, can_go_back=True))
    return worker


def report_of(worker: Worker, number: int = 2) -> Report:
    report = sent(worker.feed(Freeze(term=1, number=number)), Report)
    assert report is not None
    return report


def test_a_tail_cut_short_stands_in_front_of_its_gate_again() -> None:
    worker = behind(1)
    worker.feed(LOSS)
    worker.feed(TailStruck(step=1))
    assert asked(worker.feed(BoundaryReached(step=1, attempts=2)), Proceed) is None
    report = report_of(worker)
    assert (report.applied, report.last_result) == (Version(step=1, lineage=1), ())
    plan = back_to(1)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)
    worker.cut_over_done(plan)
    assert asked(worker.feed(Commit(term=1, number=2)), Proceed) == Proceed(step=1)


def test_one_that_is_through_goes_back_by_plan() -> None:
    worker = over(1)
    worker.feed(LOSS)
    assert isinstance(worker.state.main, RunningOut)
    worker.feed(BoundaryReached(step=2, attempts=3, can_go_back=True))
    report = report_of(worker)
    assert (report.applied.step, report.previous) == (2, Version(step=1, lineage=1))
    plan = back_to(1)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)
    assert worker.state.applied == plan.target
    worker.cut_over_done(plan)
    assert asked(worker.feed(Commit(term=1, number=2)), Proceed) == Proceed(step=1)
    assert worker.state.previous is None


def test_it_undoes_first_where_it_is_held_in_the_next_gate() -> None:
    worker = over(1)
    worker.enter_gate(2)
    worker.feed(LOSS)
    report_of(worker)
    plan = back_to(1)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), UndoStep) == UndoStep(step=2)
    commands = worker.feed(BoundaryReached(step=2, attempts=3, can_go_back=True))
    assert asked(commands, CutOver) == CutOver(plan=plan)


def test_it_runs_out_first_where_the_plan_is_faster() -> None:
    worker = over(1)
    worker.feed(LOSS)
    report_of(worker)
    plan = back_to(1)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) is None
    commands = worker.feed(BoundaryReached(step=2, attempts=3, can_go_back=True))
    assert asked(commands, CutOver) == CutOver(plan=plan)


def test_one_that_went_back_for_an_aborted_plan_says_where_it_is() -> None:
    worker = over(1)
    worker.feed(LOSS)
    worker.feed(BoundaryReached(step=2, attempts=3, can_go_back=True))
    report_of(worker)
    worker.feed(PlanIssued(term=1, plan=back_to(1)))
    report = report_of(worker, number=3)
    assert (report.applied.step, report.previous) == (1, None)


def test_personal_state_of_the_version_before_is_kept_as_long() -> None:
    worker = over(1)
    assert {held.version.step for held in worker.state.personal} == {1, 2}
    worker.feed(GateRequested(step=2, kind=flags.STEP, flags=VECTOR))
    worker.hold_wards(3)
    worker.pass_gate(2)
    worker.feed(BoundaryReached(step=3, attempts=3))
    assert {held.version.step for held in worker.state.personal} == {3}
    assert all(isinstance(held, Held) for held in worker.state.personal)


def test_a_snapshot_that_the_gate_asked_for_is_asked_for_again() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    vector = list(VECTOR)
    vector[flags.SNAPSHOT] = 2
    worker.pass_gate(0, vector=tuple(vector))
    worker.feed(LOSS)
    worker.feed(BoundaryReached(step=0, attempts=1))
    assert worker.state.snapshot_wanted == 2


def test_no_flag_of_the_gate_taken_back_is_met() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.pass_gate(0, vector=vector_with(switch=7, stop=1))
    worker.feed(LOSS)
    worker.feed(BoundaryReached(step=0, attempts=1))
    assert isinstance(worker.state.main, Bound)
    assert worker.state.last_result == ()


def test_a_long_tail_says_so_until_it_can_report() -> None:
    worker = behind(0)
    worker.feed(LOSS)
    said = sent(worker.feed(Freeze(term=1, number=2)), InTail)
    assert said == InTail(incarnation=ME, number=2)
    commands = worker.wait(20.0)  # four times the limit of a run-out
    assert sent(commands, InTail) is not None
    assert asked(commands, StopWorker) is None
    commands = worker.feed(BoundaryReached(step=1, attempts=1))
    assert sent(commands, Report) is not None
    assert sent(worker.wait(3.0), InTail) is None


def test_a_tail_that_never_ends_is_given_up() -> None:
    worker = behind(0)
    worker.feed(LOSS)
    stopped = asked(worker.wait(70.0), StopWorker)
    assert stopped is not None
    assert (stopped.code, stopped.reason) == (exits.INTERRUPTED, "W10: the tail took over 60 s")


def test_one_that_was_cut_short_has_the_time_of_a_run_out() -> None:
    worker = behind(0)
    worker.feed(LOSS)
    worker.feed(TailStruck(step=0))
    stopped = asked(worker.wait(8.0), StopWorker)
    assert stopped is not None
    assert "running out took over" in stopped.reason
