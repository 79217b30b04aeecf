"""Notices: what still fits the time that is left, who moves, what is saved; a doubtful loss."""

from __future__ import annotations

from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, hold, sent, settle, sharded
from tests.unit.controller.test_checkpoints import DURABLE, answer, commit, stop_at

from trainmover import controller
from trainmover.protocol import journal
from trainmover.protocol import messages as m

NAMES = ("m0", "m1", "m2", "m3")


def measured(seconds: float) -> Stage:
    """A job whose first checkpoint, of step 2, has taken so long."""
    settings = (*DURABLE, ("checkpoint.parallel_machines_share", "1.0"))
    stage = sharded(settings=settings)
    settle(stage)
    hold(stage, at(2), level=2)
    stage.wait(1)
    stage.wait(seconds)
    for name in NAMES:
        answer(stage, name)
    commit(stage)
    hold(stage, at(2), level=1)
    return stage


def choice(stage: Stage) -> str:
    return stage.recorded(journal.NoticeRecorded)[-1].choice


def test_a_checkpoint_that_fits_is_made_at_once_by_all_machines() -> None:
    stage = measured(4)
    stage.operator(m.StopRequest(request="q", mode="boundary", grace_s=60.0))
    assert "the last state goes to storage; the last checkpoint took" in choice(stage)
    assert sent(stage, m.TakeSnapshot)[-1][1].level == 3
    before = len(sent(stage, m.WriteCheckpoint))
    stop_at(stage, 5)
    assert len(sent(stage, m.WriteCheckpoint)) == before + 4, "not at the next pulse"
    for name in NAMES:
        answer(stage, name)
    commit(stage)
    stage.wait(2)
    assert stage.ended is not None and stage.ended.code == 11


def test_what_does_not_fit_is_not_begun_and_the_job_can_go_on_from_before() -> None:
    stage = measured(30)
    stage.operator(m.StopRequest(request="q", mode="boundary", grace_s=10.0))
    assert "does not fit; the one of step 2 stays" in choice(stage)
    before = len(sent(stage, m.WriteCheckpoint))
    stop_at(stage, 5)
    stage.wait(2)
    assert len(sent(stage, m.WriteCheckpoint)) == before
    assert stage.ended is not None and stage.ended.code == 11
    assert "from the checkpoint of step 2" in stage.ended.reason


def test_the_time_is_over_wherever_the_job_stands() -> None:
    stage = measured(1)
    stage.operator(m.StopRequest(request="q", mode="boundary", grace_s=10.0))
    stage.wait(6)
    assert stage.ended is None
    stage.wait(10)
    assert stage.ended is not None and stage.ended.code == 11
    assert "the time that was left is over" in stage.ended.reason


def test_without_any_checkpoint_a_stop_is_a_stop() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    stage.operator(m.StopRequest(request="q", mode="boundary", grace_s=5.0))
    stage.wait(15)
    assert stage.ended is not None and stage.ended.code == 9


def test_a_machine_that_goes_is_moved_and_its_state_saved() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    hold(stage, at(2), level=1)
    stage.agent("m2", m.AgentLeaving(machine="m2", reason="SIGTERM", grace_s=60.0))
    assert "its ranks move to a standby; all ranks take a snapshot" in choice(stage)
    assert 3 in [order.level for _, order in sent(stage, m.TakeSnapshot)]
    hold(stage, at(2), level=3)
    assert stage.state.kept.wanted_level == 3, "an earlier snapshot does not do"


def test_a_notice_without_a_standby_says_so_and_repeats_change_nothing() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    for name in ("m2", "m3"):
        stage.operator(m.PreemptionNotice(request=name, machines=(name,), grace_s=30.0))
    count = len(stage.recorded(journal.NoticeRecorded))
    leave_by = stage.state.machines["m2"].leave_by
    stage.agent("m2", m.AgentLeaving(machine="m2", reason="SIGTERM", grace_s=30.0))
    assert stage.state.machines["m2"].leave_by == leave_by
    assert len(stage.recorded(journal.NoticeRecorded)) == count


def test_unknown_machines_and_no_place_are_refused() -> None:
    stage = sharded()
    settle(stage)
    stage.operator(m.PreemptionNotice(request="u", machines=("m77",)))
    stage.operator(m.SaveRequest(request="s"))
    refused = {reply.request: reply for reply in stage.replies if not reply.is_accepted}
    assert "no machine is called m77" in refused["u"].text
    assert "--checkpoints" in refused["s"].text


def test_when_all_go_the_first_ones_end_is_the_jobs() -> None:
    stage = measured(1)
    for name in stage.names:
        stage.agent(name, m.AgentLeaving(machine=name, reason="SIGTERM", grace_s=20.0))
    stage.wait(1)
    assert stage.recorded(journal.StopRequested)
    assert stage.state.stop_by is not None
    stage.wait(25)
    assert stage.ended is not None and stage.ended.code == 11


def test_an_alarm_keeps_the_last_good_version_aside() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    hold(stage, at(2), level=1)
    stage.wait(1)
    assert sent(stage, m.WriteCheckpoint) == []
    name = stage.members()[0].incarnation
    alarm = m.LossAlarm(
        incarnation=name, rank=0, version=at(3), kind="non_finite", text="step 2 logged loss = nan"
    )
    stage.agent("m0", m.FromWorker(machine="m0", incarnation=name, body=alarm))
    stage.wait(1)
    assert {order.version for _, order in sent(stage, m.WriteCheckpoint)} == {at(2)}


def test_rank_0_hears_what_saves_cost() -> None:
    stage = measured(4)
    stage.wait(1)
    bodies = [body for _, body in sent(stage, m.CostsMeasured)]
    assert bodies[0].save_s == 0.0 and bodies[-1].save_s >= 4.0


def test_what_copies_are_worth_is_told() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2), level=1)
    stage.wait(2)
    view = controller.status(stage.state, stage.now)
    assert view.snapshot_survival[0] == 1.0
    assert "1 machine lost at once: 100 %" in view.snapshot_worth


def test_a_script_that_fails_leaves_its_last_snapshot_in_a_checkpoint() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    hold(stage, at(2), level=1)
    name = stage.members()[1].incarnation
    failed = m.ScriptFailed(
        incarnation=name,
        rank=1,
        step=3,
        text="Traceback\nMemoryError",
        error="MemoryError",
        was_running_out=False,
        is_machine_caused=False,
    )
    stage.agent("m1", m.FromWorker(machine="m1", incarnation=name, body=failed))
    stage.wait(1)
    assert stage.phase == "Ending" and stage.ended is None
    assert sent(stage, m.StopAgent) == [], "agents stay until it is durable"
    for _ in range(4):
        for machine in NAMES:
            if machine in stage.state.kept.writing.busy:
                answer(stage, machine)
    commit(stage)
    assert sent(stage, m.StopAgent) != []
    stage.wait(20)
    assert stage.ended is not None and stage.ended.code == 1
    assert "[checkpoint of step 2: step-2]" in stage.ended.reason.splitlines()[0]


def test_a_last_checkpoint_that_does_not_come_delays_the_end_for_a_while_only() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    hold(stage, at(2), level=1)
    name = stage.members()[1].incarnation
    failed = m.ScriptFailed(
        incarnation=name,
        rank=1,
        step=3,
        text="x",
        error="x",
        was_running_out=False,
        is_machine_caused=False,
    )
    stage.agent("m1", m.FromWorker(machine="m1", incarnation=name, body=failed))
    stage.wait(45)
    assert stage.ended is not None and stage.ended.code == 1


def test_a_save_is_measured_although_the_next_one_begins_at_once() -> None:
    stage = measured(4)
    hold(stage, at(4), level=2)
    stage.wait(1)
    hold(stage, at(6), level=2)
    stage.wait(9)
    for name in NAMES:
        answer(stage, name)
    commit(stage)
    assert stage.state.kept.save_s >= 9.0
