"""A planned switchover seen by stayer, leaver and joiner."""

from __future__ import annotations

from tests.unit.worker_lifecycle.stories import (
    ME,
    Worker,
    a_plan,
    asked,
    edge,
    sent,
    vector_with,
)

from trainmover.protocol import flags
from trainmover.protocol.messages import (
    Abort,
    AtBoundary,
    BecomeStandby,
    Broken,
    Commit,
    Done,
    Freeze,
    Lost,
    PhaseOneReady,
    Plan,
    PlanIssued,
    Prepare,
    RaiseFlag,
    Release,
    Report,
    StandbyReady,
    Version,
)
from trainmover.worker.events import (
    AbortGeneration,
    BoundaryReached,
    ChannelBroken,
    CommitGeneration,
    ContributeGate,
    CutOver,
    LeaveMain,
    PhaseOneDone,
    PreparePhaseOne,
    Proceed,
)
from trainmover.worker.lifecycle import flags_to_carry
from trainmover.worker.lifecycle_state import Parked, Running

AFTER = (ME, "m9.0.b", "m2.0.a", "m3.0.a")


def offer(names: tuple[str, ...] = AFTER, leaver: str = "m1.0.a", joiner: str = "m9.0.b") -> Plan:
    target = Version(step=-1)
    return a_plan(2, names, kind="planned", target=target, leavers=(leaver,), joiners=(joiner,))


def at(plan: Plan, step: int) -> Plan:
    target = Version(step=step, lineage=1)
    return a_plan(
        2,
        tuple(member.incarnation for member in plan.membership.members),
        kind="planned",
        target=target,
        leavers=plan.leavers,
        joiners=plan.joiners,
    )


def flagged(plan: Plan) -> Worker:
    """Phase one is done and the flag rides on gate 0."""
    worker = Worker().form()
    assert asked(worker.feed(Prepare(term=1, plan=plan)), PreparePhaseOne) is not None
    assert sent(worker.feed(PhaseOneDone(number=2)), PhaseOneReady) is not None
    worker.feed(RaiseFlag(term=1, number=2))
    assert flags_to_carry(worker.state) == (2, False)
    contribution = asked(worker.enter_gate(0), ContributeGate)
    assert contribution is not None
    assert contribution.flags[flags.SWITCH_NUMBER] == 2
    worker.pass_gate(0, vector=vector_with(switch=2))
    return worker


def test_a_stayer_stops_at_the_flagged_boundary_and_cuts_over_at_once() -> None:
    plan = offer()
    worker = flagged(plan)
    commands = worker.feed(BoundaryReached(step=1))
    boundary = sent(commands, AtBoundary)
    assert boundary is not None
    assert boundary.version == Version(step=1, lineage=1)
    assert asked(commands, CutOver) == CutOver(plan=at(plan, 1))
    assert worker.feed(PlanIssued(term=1, plan=at(plan, 1))) == ()
    assert sent(worker.cut_over_done(at(plan, 1)), Done) is not None
    assert asked(worker.feed(Commit(term=1, number=2)), Proceed) == Proceed(step=1)
    assert flags_to_carry(worker.state) == (0, False)


def test_the_target_may_arrive_before_the_boundary() -> None:
    plan = offer()
    worker = flagged(plan)
    assert worker.feed(PlanIssued(term=1, plan=at(plan, 1))) == ()
    assert asked(worker.feed(BoundaryReached(step=1)), CutOver) == CutOver(plan=at(plan, 1))


def test_a_rank_without_the_offer_waits_for_the_plan() -> None:
    worker = Worker().form()
    worker.enter_gate(0)
    worker.pass_gate(0, vector=vector_with(switch=2))
    commands = worker.feed(BoundaryReached(step=1))
    assert sent(commands, AtBoundary) is not None
    assert asked(commands, CutOver) is None
    plan = at(offer(), 1)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)


def test_a_flag_of_a_number_known_to_be_aborted_stops_nobody() -> None:
    worker = flagged(offer())
    worker.feed(Abort(term=1, number=2))
    assert asked(worker.feed(BoundaryReached(step=1)), Proceed) == Proceed(step=1)


def test_an_abort_while_waiting_goes_back_to_training() -> None:
    worker = flagged(offer())
    worker.feed(BoundaryReached(step=1))
    commands = worker.feed(Abort(term=1, number=2))
    assert asked(commands, AbortGeneration) == AbortGeneration(number=2, back_to=1)
    assert asked(commands, Proceed) == Proceed(step=1)


def test_the_leaver_keeps_its_state_until_it_is_released() -> None:
    plan = offer(("m9.0.b", "m1.0.a", "m2.0.a", "m3.0.a"), leaver=ME)
    worker = flagged(plan)
    worker.feed(BoundaryReached(step=1))
    assert sent(worker.cut_over_done(at(plan, 1)), Done) is not None
    commands = worker.feed(Commit(term=1, number=2))
    assert asked(commands, CommitGeneration) is not None
    assert asked(commands, Proceed) is None
    assert asked(commands, LeaveMain) is None
    assert asked(worker.feed(Release(term=1, number=2)), LeaveMain) is not None


def test_a_release_overtaking_the_commit_is_a_release() -> None:
    plan = offer(("m9.0.b", "m1.0.a", "m2.0.a", "m3.0.a"), leaver=ME)
    worker = flagged(plan)
    worker.feed(BoundaryReached(step=1))
    worker.cut_over_done(at(plan, 1))
    assert asked(worker.feed(Release(term=1, number=2)), LeaveMain) is not None


def test_prepared_ignores_the_leaver_and_notes_breaks_with_members() -> None:
    plan = offer()
    worker = flagged(plan)
    worker.feed(BoundaryReached(step=1))
    worker.cut_over_done(at(plan, 1))
    assert worker.feed(ChannelBroken(generation=1, edge=edge("m1.0.a"))) == ()
    assert worker.feed(ChannelBroken(generation=1, edge=edge("m2.0.a"))) == ()
    broken = sent(worker.feed(Commit(term=1, number=2)), Broken)
    assert broken is not None
    assert (broken.generation, broken.edges) == (2, (edge("m2.0.a"),))


def test_prepared_then_aborted_says_what_broke_meanwhile() -> None:
    plan = offer()
    worker = flagged(plan)
    worker.feed(BoundaryReached(step=1))
    worker.cut_over_done(at(plan, 1))
    worker.feed(ChannelBroken(generation=1, edge=edge("m2.0.a")))
    commands = worker.feed(Abort(term=1, number=2))
    broken = sent(commands, Broken)
    assert broken is not None
    assert broken.generation == 1
    assert asked(commands, Proceed) is None


def test_a_channel_of_the_next_generation_only_is_lost_not_broken() -> None:
    worker = flagged(offer())
    worker.feed(BoundaryReached(step=1))
    commands = worker.feed(ChannelBroken(generation=2, edge=edge("m9.0.b")))
    lost = sent(commands, Lost)
    assert lost is not None
    assert lost.edge.peer == "m9.0.b"
    assert sent(commands, Broken) is None


def joiner() -> Worker:
    worker = Worker("m9.0.b")
    worker.feed(BecomeStandby(term=1, as_rank=0, world_size=4))
    worker.feed(BoundaryReached(step=0, identity="all"))
    return worker


def test_a_joiner_prepares_cuts_over_and_runs_from_the_target() -> None:
    plan = offer()
    worker = joiner()
    assert asked(worker.feed(Prepare(term=1, plan=plan)), PreparePhaseOne) is not None
    assert sent(worker.feed(PhaseOneDone(number=2)), PhaseOneReady) is not None
    plan = at(plan, 4)
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) == CutOver(plan=plan)
    assert sent(worker.cut_over_done(plan), Done) is not None
    commands = worker.feed(Commit(term=1, number=2))
    assert asked(commands, Proceed) == Proceed(step=4)
    assert (worker.state.rank, worker.state.generation) == (1, 2)
    assert isinstance(worker.state.main, Running)


def test_an_aborted_joiner_is_a_standby_again() -> None:
    worker = joiner()
    worker.feed(Prepare(term=1, plan=offer()))
    commands = worker.feed(Abort(term=1, number=2))
    assert asked(commands, AbortGeneration) is not None
    assert sent(commands, StandbyReady) is not None
    assert isinstance(worker.state.main, Parked)


def test_a_prepared_joiner_keeps_its_load_at_a_freeze() -> None:
    plan = at(offer(), 4)
    worker = joiner()
    worker.feed(PlanIssued(term=1, plan=plan))
    worker.cut_over_done(plan)
    commands = worker.feed(Freeze(term=1, number=3))
    report = sent(commands, Report)
    assert report is not None
    assert (report.rank, report.prepared_number, report.applied.step) == (-1, 2, 4)
    assert asked(commands, AbortGeneration) is None


def test_a_joiner_told_too_early_builds_first() -> None:
    plan = a_plan(2, AFTER, joiners=("m9.0.b",))
    worker = Worker("m9.0.b")
    worker.feed(BecomeStandby(term=1, as_rank=1, world_size=4))
    worker.feed(Freeze(term=1, number=2))
    assert asked(worker.feed(PlanIssued(term=1, plan=plan)), CutOver) is None
    assert asked(worker.feed(BoundaryReached(step=0)), CutOver) == CutOver(plan=plan)
