"""A member's ordinary life: up, formed, gates, hold-back, finish."""

from __future__ import annotations

from tests.unit.worker_lifecycle.stories import (
    FORM,
    VECTOR,
    Worker,
    asked,
    sent,
    vector_with,
)

from trainmover.protocol import exits, flags
from trainmover.protocol.messages import (
    BecomeStandby,
    Commit,
    CommitAcknowledged,
    Complete,
    Done,
    Fence,
    FinishPassed,
    FirstGate,
    Held,
    LinkLost,
    PlanIssued,
    Report,
    ScriptFailed,
    StandbyReady,
    StopAtBoundary,
    Tracked,
    Version,
    WorkerUp,
)
from trainmover.worker.events import (
    ApplyGate,
    BoundaryReached,
    ContributeGate,
    CutOver,
    EnterMain,
    FinishMain,
    GateCompleted,
    GateRequested,
    LinkDown,
    LinkUp,
    MainFailed,
    PersonalReceived,
    Proceed,
    Started,
    StopWorker,
)
from trainmover.worker.lifecycle import Transition, WorkerState, transition
from trainmover.worker.lifecycle_state import InGate, Parked, Running


def test_a_worker_that_is_up_says_so_until_somebody_speaks_to_it() -> None:
    worker = Worker()
    assert sent(worker.wait(2.5), WorkerUp) is not None
    worker.feed(BecomeStandby(term=1, as_rank=2, world_size=4))
    assert sent(worker.wait(30.0), WorkerUp) is None


def test_forming_swaps_channels_first_and_enters_main_at_the_commit() -> None:
    worker = Worker()
    assert asked(worker.feed(PlanIssued(term=1, plan=FORM)), CutOver) is not None
    done = sent(worker.cut_over_done(FORM), Done)
    assert done is not None
    assert done.version == FORM.target
    assert worker.feed(PlanIssued(term=1, plan=FORM)) == ()
    commands = worker.feed(Commit(term=1, number=1))
    enter = asked(commands, EnterMain)
    assert enter is not None
    assert (enter.rank, enter.is_loopback) == (0, False)
    assert sent(commands, CommitAcknowledged) is not None
    commands = worker.feed(BoundaryReached(step=0, identity="all"))
    assert sent(commands, Tracked) is not None
    assert asked(commands, Proceed) == Proceed(step=0)


def test_a_form_plan_is_no_freeze_and_is_not_reported() -> None:
    worker = Worker()
    assert sent(worker.feed(PlanIssued(term=1, plan=FORM)), Report) is None


def test_the_contribution_waits_for_the_personal_state_of_all_wards() -> None:
    worker = Worker().form()
    assert worker.feed(GateRequested(step=0, kind=flags.STEP, flags=VECTOR)) == ()
    stale = Held(owner_rank=3, version=Version(step=1, lineage=9), is_final=True)
    assert worker.feed(PersonalReceived(held=stale)) == ()
    commands = worker.hold_wards(1)
    assert asked(commands, ContributeGate) == ContributeGate(step=0, kind=flags.STEP, flags=VECTOR)
    assert isinstance(worker.state.main, InGate)


def test_a_second_copy_tells_that_updates_are_held_and_a_third_changes_nothing() -> None:
    worker = Worker().form()
    at = Version(step=1, lineage=1)
    final = Held(owner_rank=3, version=at, is_final=True)
    worker.feed(PersonalReceived(held=final))
    of_the_gate = Held(
        owner_rank=3, version=at, is_final=False, replay_from=Version(step=0, lineage=1)
    )
    worker.feed(PersonalReceived(held=of_the_gate))
    (held,) = worker.state.personal
    assert held.is_final
    assert held.replay_from == Version(step=0, lineage=1)
    worker.feed(PersonalReceived(held=final))
    assert worker.state.personal == (held,)


def test_a_gate_is_contributed_to_once() -> None:
    worker = Worker().form()
    assert asked(worker.enter_gate(0), ContributeGate) is not None
    assert worker.enter_gate(0) == ()
    assert worker.hold_wards(1) == ()


def test_a_passed_gate_is_applied_and_the_first_one_is_told() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    commands = worker.pass_gate(0)
    assert asked(commands, ApplyGate) is not None
    assert sent(commands, FirstGate) is not None
    assert asked(worker.feed(BoundaryReached(step=1)), Proceed) == Proceed(step=1)
    assert worker.state.applied == Version(step=1, lineage=1)
    worker.enter_gate(1)
    assert sent(worker.pass_gate(1), FirstGate) is None


def test_gates_of_other_generations_and_steps_are_nobodys() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    assert worker.pass_gate(0, generation=2) == ()
    assert worker.pass_gate(1) == ()
    assert isinstance(worker.state.main, InGate)


def test_loops_of_unequal_length_are_named() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    event = GateCompleted(generation=1, step=0, kind=flags.FINISH, vector=VECTOR)
    stop = asked(worker.feed(event), StopWorker)
    assert stop is not None
    assert stop.code == exits.SCRIPT_FAILED
    assert "unequal length" in stop.reason


def test_nobody_leaves_before_complete() -> None:
    worker = Worker().form().do_step(0)
    worker.feed(GateRequested(step=1, kind=flags.FINISH, flags=VECTOR))
    event = GateCompleted(generation=1, step=1, kind=flags.FINISH, vector=VECTOR)
    commands = worker.feed(event)
    finished = sent(commands, FinishPassed)
    assert finished is not None
    assert finished.step == 1
    assert asked(commands, FinishMain) is None
    assert sent(worker.wait(5.0), FinishPassed) is not None
    assert worker.feed(Complete(term=1)) == (FinishMain(),)


def test_a_rank_still_in_the_finish_gate_may_go_once_complete_is_journaled() -> None:
    worker = Worker().form().do_step(0)
    worker.feed(GateRequested(step=1, kind=flags.FINISH, flags=VECTOR))
    assert worker.feed(Complete(term=1)) == (FinishMain(),)


def test_a_stop_request_rides_on_the_gate_and_stops_all_at_one_boundary() -> None:
    worker = Worker().form()
    worker.feed(StopAtBoundary(term=1))
    contribution = asked(worker.enter_gate(0), ContributeGate)
    assert contribution is not None
    assert contribution.flags[flags.STOP_REQUESTED] == 1
    worker.pass_gate(0, vector=vector_with(stop=1))
    commands = worker.feed(BoundaryReached(step=1))
    finished = sent(commands, FinishPassed)
    assert finished is not None
    assert finished.is_stopped
    assert asked(commands, Proceed) is None


def test_the_scripts_exception_is_the_controllers_to_judge() -> None:
    worker = Worker().form()
    event = MainFailed(
        rank=0,
        step=0,
        text="Traceback",
        error="ValueError: x",
        was_running_out=False,
        is_machine_caused=False,
    )
    commands = worker.feed(event)
    assert sent(commands, ScriptFailed) is not None
    assert asked(commands, StopWorker) is None
    assert sent(worker.wait(3.0), ScriptFailed) is not None
    stop = asked(worker.wait(worker.state.config.controller_timeout_s + 1.0), StopWorker)
    assert stop is not None
    assert stop.code == exits.SCRIPT_FAILED


def test_a_standby_builds_parks_and_says_so() -> None:
    worker = Worker()
    enter = asked(worker.feed(BecomeStandby(term=1, as_rank=2, world_size=4)), EnterMain)
    assert enter is not None
    assert (enter.rank, enter.is_loopback, enter.attempts) == (2, True, -1)
    assert worker.feed(BecomeStandby(term=1, as_rank=2, world_size=4)) == ()
    ready = sent(worker.feed(BoundaryReached(step=0, identity="all", attempts=2)), StandbyReady)
    assert ready is not None
    assert (ready.as_rank, ready.attempts) == (2, 2)
    assert isinstance(worker.state.main, Parked)
    assert sent(worker.wait(6.0), StandbyReady) is not None


def test_an_old_controller_is_not_obeyed() -> None:
    worker = Worker()
    worker.feed(BecomeStandby(term=3, as_rank=2, world_size=4))
    assert worker.feed(BecomeStandby(term=2, as_rank=1, world_size=4)) == ()
    assert worker.state.term == 3


def test_unanswered_messages_are_repeated_when_the_link_is_back() -> None:
    worker = Worker().form()
    worker.feed(LinkDown())
    worker.enter_gate(0)
    worker.pass_gate(0)
    assert worker.wait(5.0) == ()
    assert sent(worker.feed(LinkUp()), FirstGate) is not None


def test_training_goes_on_without_controller_but_an_idle_worker_ends() -> None:
    member = Worker().form()
    member.feed(LinkDown())
    assert asked(member.wait(1000.0), StopWorker) is None
    idle = Worker()
    idle.feed(LinkDown())
    commands = idle.wait(idle.state.config.controller_timeout_s + 1.0)
    assert sent(commands, LinkLost) is not None
    stop = asked(commands, StopWorker)
    assert stop is not None
    assert stop.code == exits.CONTROLLER_LOST


def test_a_fenced_worker_ends_and_decides_nothing_any_more() -> None:
    worker = Worker().form()
    stop = asked(worker.feed(Fence(term=1, generation=2, reason="replaced")), StopWorker)
    assert stop is not None
    assert stop.is_fenced
    assert worker.enter_gate(0) == ()
    assert worker.wait(1000.0) == ()


def test_a_fence_of_an_older_generation_is_old() -> None:
    worker = Worker().form()
    assert worker.feed(Fence(term=1, generation=0, reason="old")) == ()
    assert isinstance(worker.state.main, Running)


def test_the_decider_is_a_function_of_its_arguments() -> None:
    worker = Worker()
    event = Started(host="h", port=1, pid=7)
    before: WorkerState = worker.state
    moves: list[Transition] = [transition(before, event, worker.now) for _ in range(2)]
    assert moves[0] == moves[1]
    assert worker.state is before
