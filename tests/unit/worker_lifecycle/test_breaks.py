"""A generation breaks: run out, hold, tail, freeze, report, plan."""

from __future__ import annotations

import pytest
from tests.unit.worker_lifecycle.stories import (
    ME,
    NAMES,
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
    Broken,
    Commit,
    CommitAcknowledged,
    Complete,
    Done,
    Freeze,
    Plan,
    PlanIssued,
    Report,
    Source,
    Version,
)
from trainmover.worker.events import (
    AbortGeneration,
    ApplyGate,
    BoundaryReached,
    BreakGeneration,
    ChannelBroken,
    CloseGates,
    CommitGeneration,
    ContributeGate,
    CutOver,
    EnterMain,
    GateCompleted,
    GateRequested,
    MainFailed,
    NextGenerationFrame,
    Poisoned,
    Proceed,
    RunOutFailed,
    StopWorker,
    UndoStep,
)
from trainmover.worker.lifecycle_state import Bound, HeldInGate

OTHERS = (ME, "m9.0.b", "m2.0.a", "m3.0.a")
LOSS = ChannelBroken(generation=1, edge=edge("m1.0.a"))


def replacement(number: int, step: int, **more: object) -> Plan:
    source = Source(rank=1, bulk_from=ME, own_from=ME, shared_from=ME, kind="replica")
    target = Version(step=step, lineage=1)
    known = {"target": target, "joiners": ("m9.0.b",), "sources": (source,)}
    return a_plan(number, OTHERS, **(known | more))


def test_in_front_of_the_gate_a_break_runs_out_and_the_step_is_repeated() -> None:
    worker = Worker().form().do_step(0)
    commands = worker.feed(LOSS)
    assert asked(commands, BreakGeneration) is not None
    broken = sent(commands, Broken)
    assert broken is not None
    assert (broken.step, broken.edges) == (1, (edge("m1.0.a"),))
    assert asked(worker.feed(BoundaryReached(step=1)), Proceed) is None
    report = sent(worker.feed(Freeze(term=1, number=2)), Report)
    assert report is not None
    assert (report.applied.step, report.has_entered) == (1, False)
    plan = replacement(2, 1)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)
    worker.cut_over_done(plan)
    commands = worker.feed(Commit(term=1, number=2))
    assert asked(commands, Proceed) == Proceed(step=1)
    assert worker.state.generation == 2


def test_each_further_peer_that_is_gone_is_told_also_behind_the_report() -> None:
    """Several machines at one instant: nobody waits for a report of one that some peer has lost."""
    worker = Worker().form().do_step(0)
    worker.feed(LOSS)
    both = (edge("m1.0.a"), edge("m2.0.a"))
    told = sent(worker.feed(ChannelBroken(generation=1, edge=both[1])), Broken)
    assert told is not None
    assert told.edges == both
    worker.feed(Freeze(term=1, number=2))
    three = ChannelBroken(generation=1, edge=edge("m3.0.a"))
    told = sent(worker.feed(three), Broken)
    assert told is not None
    assert told.edges == (*both, edge("m3.0.a"))
    assert sent(worker.feed(three), Broken) is None
    assert sent(worker.feed(Poisoned(generation=1, peer="m3.0.a", edges=both)), Broken) is None


def test_ready_but_not_contributed_undoes() -> None:
    worker = Worker().form()
    worker.feed(GateRequested(step=0, kind=flags.STEP, flags=VECTOR))
    assert asked(worker.feed(LOSS), UndoStep) == UndoStep(step=0)


def test_a_void_attempt_that_reaches_the_gate_is_undone() -> None:
    worker = Worker().form()
    worker.feed(LOSS)
    commands = worker.feed(GateRequested(step=0, kind=flags.STEP, flags=VECTOR))
    assert commands == (UndoStep(step=0),)


def test_inside_the_gate_a_break_holds_and_late_frames_pass_nothing() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    commands = worker.feed(LOSS)
    assert asked(commands, UndoStep) is None
    assert isinstance(worker.state.main, HeldInGate)
    assert worker.pass_gate(0) == ()


def test_held_and_some_rank_passed_applies_with_the_plans_result() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.feed(LOSS)
    report = sent(worker.feed(Freeze(term=1, number=2)), Report)
    assert report is not None
    assert (report.applied.step, report.has_entered) == (0, True)
    result = vector_with(stop=0)
    plan = replacement(2, 1, result=result)
    commands = worker.feed(PlanIssued(term=1, plan=plan))
    assert asked(commands, ApplyGate) == ApplyGate(step=0, kind=flags.STEP, vector=result)
    assert asked(commands, CutOver) is None
    assert asked(worker.feed(BoundaryReached(step=1)), CutOver) == CutOver(plan=plan)


def test_held_and_no_rank_passed_undoes() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.feed(LOSS)
    worker.feed(Freeze(term=1, number=2))
    plan = replacement(2, 0)
    assert worker.feed(PlanIssued(term=1, plan=plan)) == (UndoStep(step=0),)
    assert asked(worker.feed(BoundaryReached(step=0)), CutOver) == CutOver(plan=plan)


def test_held_without_a_result_can_not_apply() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.feed(Freeze(term=1, number=2))
    stop = asked(worker.feed(PlanIssued(term=1, plan=replacement(2, 1))), StopWorker)
    assert stop is not None
    assert stop.code == exits.PROTOCOL_FAILED


def test_in_the_tail_a_freeze_is_answered_at_the_boundary() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.pass_gate(0)
    commands = worker.feed(Freeze(term=1, number=2))
    assert sent(commands, Report) is None
    assert asked(commands, BreakGeneration) is not None
    commands = worker.feed(BoundaryReached(step=1, broken_state="ema.shadow"))
    report = sent(commands, Report)
    assert report is not None
    assert report.applied == Version(step=1, lineage=1)
    assert report.broken_state == "ema.shadow"
    assert asked(commands, Proceed) is None


def test_a_freeze_is_a_promise_nothing_passes_after_it() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    commands = worker.feed(Freeze(term=1, number=2))
    assert asked(commands, CloseGates) == CloseGates(below=2)
    assert worker.pass_gate(0) == ()
    assert isinstance(worker.state.main, HeldInGate)
    again = sent(worker.feed(Freeze(term=1, number=2)), Report)
    assert again is not None
    assert again.applied.step == 0


def test_a_plan_of_an_older_freeze_is_refused() -> None:
    worker = Worker().form()
    worker.feed(Freeze(term=1, number=2))
    worker.feed(Freeze(term=1, number=3))
    assert worker.feed(PlanIssued(term=1, plan=replacement(2, 0))) == ()
    assert worker.feed(Freeze(term=1, number=2)) == ()


@pytest.mark.parametrize("without", [(), ("promise",)])
def test_a_plan_overtaken_by_a_freeze_would_belie_the_report(without: tuple[str, ...]) -> None:
    """Finding 11. Links keep their order and an abort goes ahead of a new freeze, so that the
    simulation never gets a plan to a worker that has promised a later one: shown here instead."""
    worker = Worker(without=without).form()
    worker.enter_gate(0)
    worker.feed(LOSS)
    worker.feed(Freeze(term=1, number=2))
    report = sent(worker.feed(Freeze(term=1, number=3)), Report)
    assert report is not None
    assert report.applied.step == 0
    late = replacement(2, 1, result=vector_with(stop=0))
    commands = worker.feed(PlanIssued(term=1, plan=late))
    if without:
        assert asked(commands, ApplyGate) is not None, "the rule is what keeps the report true"
    else:
        assert commands == ()
        assert worker.state.promise == 3


def test_a_newer_freeze_drops_a_cut_over_that_is_not_done() -> None:
    worker = Worker().form()
    worker.feed(LOSS)
    worker.feed(BoundaryReached(step=0))
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=replacement(2, 0)))
    commands = worker.feed(Freeze(term=1, number=3))
    assert asked(commands, AbortGeneration) == AbortGeneration(number=2, back_to=0)
    report = sent(commands, Report)
    assert report is not None
    assert report.prepared_number == 0
    assert worker.cut_over_done(replacement(2, 0)) == ()


def prepared() -> Worker:
    worker = Worker().form()
    worker.feed(LOSS)
    worker.feed(BoundaryReached(step=0))
    worker.feed(Freeze(term=1, number=2))
    worker.feed(PlanIssued(term=1, plan=replacement(2, 0)))
    assert sent(worker.cut_over_done(replacement(2, 0)), Done) is not None
    return worker


def test_prepared_survives_a_freeze_and_says_so() -> None:
    worker = prepared()
    commands = worker.feed(Freeze(term=1, number=3))
    assert asked(commands, AbortGeneration) is None
    report = sent(commands, Report)
    assert report is not None
    assert report.prepared_number == 2


def test_a_commit_that_comes_after_a_freeze_makes_a_frozen_member() -> None:
    worker = prepared()
    worker.feed(Freeze(term=1, number=3))
    commands = worker.feed(Commit(term=1, number=2))
    assert asked(commands, CommitGeneration) is not None
    assert asked(commands, Proceed) is None
    assert worker.state.generation == 2
    assert worker.state.is_frozen


@pytest.mark.parametrize(("base", "kind"), [(2, CommitGeneration), (1, AbortGeneration)])
def test_a_plan_says_by_its_base_what_became_of_the_open_number(base: int, kind: type) -> None:
    worker = prepared()
    worker.feed(Freeze(term=1, number=3))
    plan = replacement(3, 0, base_generation=base)
    commands = worker.feed(PlanIssued(term=1, plan=plan))
    assert asked(commands, kind) is not None
    assert asked(commands, CutOver) == CutOver(plan=plan)


def test_a_frame_of_the_next_generation_is_a_commit() -> None:
    worker = prepared()
    commands = worker.feed(NextGenerationFrame(generation=2))
    assert asked(commands, Proceed) == Proceed(step=0)
    assert sent(worker.feed(Commit(term=1, number=2)), CommitAcknowledged) is not None


def test_next_generation_broken_before_its_commit_arrived_here() -> None:
    worker = prepared()
    worker.feed(Poisoned(generation=2, peer="m2.0.a"))
    commands = worker.feed(Commit(term=1, number=2))
    broken = sent(commands, Broken)
    assert broken is not None
    assert broken.generation == 2


def test_an_aborted_unplanned_number_leaves_the_worker_frozen() -> None:
    worker = prepared()
    commands = worker.feed(Abort(term=1, number=2))
    assert commands == (AbortGeneration(number=2, back_to=0),)
    assert isinstance(worker.state.main, Bound)
    assert sent(worker.feed(Freeze(term=1, number=3)), Report) is not None


def test_a_gate_that_waits_too_long_is_a_break() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    assert sent(worker.wait(worker.state.config.gate_timeout_s + 1.0), Broken) is not None


def test_stopped_inside_a_gate_it_asks_instead_of_passing() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.now += 20 * 10**9  # type: ignore[assignment]
    commands = worker.pass_gate(0)
    assert asked(commands, ApplyGate) is None
    assert sent(commands, Broken) is not None
    assert isinstance(worker.state.main, HeldInGate)


def test_stopped_in_front_of_a_gate_it_hears_its_peers_before_it_contributes() -> None:
    worker = Worker().form()
    worker.hold_wards(1)
    worker.now += 20 * 10**9  # type: ignore[assignment]
    assert worker.feed(GateRequested(step=0, kind=flags.STEP, flags=VECTOR)) == ()
    assert asked(worker.feed(Poisoned(generation=1, peer="m2.0.a")), UndoStep) is not None


def test_stopped_in_front_of_a_gate_and_nobody_went_on_without_it() -> None:
    worker = Worker().form()
    worker.hold_wards(1)
    worker.now += 20 * 10**9  # type: ignore[assignment]
    worker.feed(GateRequested(step=0, kind=flags.STEP, flags=VECTOR))
    assert asked(worker.wait(1.0), ContributeGate) is not None


def test_running_out_too_long_gives_the_process_up() -> None:
    worker = Worker().form()
    worker.feed(LOSS)
    stop = asked(worker.wait(worker.state.config.run_out_timeout_s + 1.0), StopWorker)
    assert stop is not None
    assert stop.code == exits.INTERRUPTED


@pytest.mark.parametrize(
    "event",
    [
        RunOutFailed(reason="exception half-way through backward"),
        MainFailed(
            rank=0,
            step=0,
            text="",
            error="IndexError",
            was_running_out=True,
            is_machine_caused=False,
        ),
    ],
)
def test_a_failure_while_running_out_costs_this_process_only(event: RunOutFailed) -> None:
    worker = Worker().form()
    worker.feed(LOSS)
    stop = asked(worker.feed(event), StopWorker)
    assert stop is not None
    assert stop.code == exits.INTERRUPTED


def test_frozen_for_too_long_the_controller_is_lost() -> None:
    worker = Worker().form()
    worker.feed(LOSS)
    worker.feed(BoundaryReached(step=0))
    worker.feed(Freeze(term=1, number=2))
    stop = asked(worker.wait(worker.state.config.controller_timeout_s + 1.0), StopWorker)
    assert stop is not None
    assert stop.code == exits.CONTROLLER_LOST


def test_a_build_on_invented_values_is_void_and_begins_anew() -> None:
    worker = Worker()
    plan = a_plan(1, NAMES, kind="form", base_generation=0, is_fresh_start=True, joiners=NAMES)
    worker.feed(PlanIssued(term=1, plan=plan))
    worker.cut_over_done(plan)
    worker.feed(Commit(term=1, number=1))
    worker.feed(LOSS)
    assert asked(worker.feed(BoundaryReached(step=0)), Proceed) is None
    report = sent(worker.feed(Freeze(term=1, number=2)), Report)
    assert report is not None
    assert report.is_building
    fresh = replacement(2, 0, is_fresh_start=True, sources=())
    assert asked(worker.feed(PlanIssued(term=1, plan=fresh)), CutOver) is not None
    worker.cut_over_done(fresh)
    commands = worker.feed(Commit(term=1, number=2))
    assert asked(commands, EnterMain) is not None
    assert asked(commands, Proceed) is None


def test_a_loss_behind_the_finish_gate_repeats_the_finish_only() -> None:
    worker = Worker().form().do_step(0)
    worker.feed(GateRequested(step=1, kind=flags.FINISH, flags=VECTOR))
    worker.feed(GateCompleted(generation=1, step=1, kind=flags.FINISH, vector=VECTOR))
    worker.feed(LOSS)
    report = sent(worker.feed(Freeze(term=1, number=2)), Report)
    assert report is not None
    assert report.applied.step == 1
    plan = replacement(2, 1)
    assert worker.feed(PlanIssued(term=1, plan=plan)) == (UndoStep(step=1),)
    assert asked(worker.feed(BoundaryReached(step=1)), CutOver) == CutOver(plan=plan)


def test_peers_that_leave_after_complete_are_no_incident_for_the_slow_one() -> None:
    worker = Worker().form().do_step(0)
    worker.feed(GateRequested(step=1, kind=flags.FINISH, flags=VECTOR))
    worker.feed(LOSS)
    assert worker.feed(Complete(term=1)) != ()
