"""Every event in every phase: no exception, no broken invariant, always a deadline.

What each pair does is told by the stories; here nothing may be forgotten. Late, repeated and
foreign messages are ordinary: each pair is tried with several numbers and senders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, held, hold, settle, sharded

from trainmover import controller
from trainmover.protocol import messages as m
from trainmover.units import Instant, seconds


def silence(stage: Stage, *kinds: type) -> None:
    stage.silenced = lambda name, body: isinstance(body, kinds)


def forming() -> Stage:
    stage = Stage()
    stage.hello("m0")
    return stage


def workers_starting() -> Stage:
    stage = Stage()
    silence(stage, m.LaunchWorkers)
    for name in stage.names:
        stage.hello(name)
    return stage


def switching_form() -> Stage:
    stage = Stage()
    silence(stage, m.PlanIssued)
    for name in stage.names:
        stage.hello(name)
    return stage


def training() -> Stage:
    return Stage().form()


def planned(silent: type) -> Callable[[], Stage]:
    def build() -> Stage:
        stage = Stage().form()
        stage.gate()
        silence(stage, silent)
        stage.operator(m.SwitchoverRequest(request="q", machines=("m1",)))
        return stage

    return build


def unplanned(silent: type) -> Callable[[], Stage]:
    def build() -> Stage:
        stage = Stage().form()
        stage.gate()
        silence(stage, silent)
        stage.exit(stage.name(1))
        return stage

    return build


def rolling_back() -> Stage:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    silence(stage, m.PlanIssued)
    stage.exit(stage.name(1))
    return stage


def hoping() -> Stage:
    stage = sharded()
    settle(stage)
    stage.gate()
    stage.crash_at = "detected"
    stage.exit(stage.name(1))
    return stage


def saving() -> Stage:
    stage = sharded(settings=(("checkpoint.directory", "/c"),))
    settle(stage)
    hold(stage, at(2), level=2)
    stage.wait(1)
    return stage


def suspending() -> Stage:
    stage = saving()
    stage.finish(is_stopped=True)
    return stage


def finishing() -> Stage:
    stage = Stage().form()
    passed = m.FinishPassed(incarnation=stage.name(0), generation=1, step=3)
    stage.worker(stage.name(0), passed)
    return stage


def completing() -> Stage:
    stage = Stage().form()
    silence(stage, m.Complete)
    stage.finish()
    return stage


def ending() -> Stage:
    stage = Stage().form()
    stage.dead.add("m3")
    stage.operator(m.StopRequest(request="q", mode="now"))
    return stage


def ended() -> Stage:
    stage = Stage().form()
    stage.finish()
    return stage


PHASES: dict[str, tuple[Callable[[], Stage], str]] = {
    "forming": (forming, "Forming"),
    "workers start": (workers_starting, "Forming"),
    "plan 1": (switching_form, "Switching"),
    "training": (training, "Training"),
    "preparing": (planned(m.Prepare), "Preparing"),
    "flagged": (planned(m.RaiseFlag), "Flagged"),
    "planned cut-over": (planned(m.PlanIssued), "Switching"),
    "freezing": (unplanned(m.Freeze), "Freezing"),
    "gathering": (unplanned(m.BecomeStandby), "Gathering"),
    "unplanned cut-over": (unplanned(m.PlanIssued), "Switching"),
    "roll-back cut-over": (rolling_back, "Switching"),
    "nothing known to restore from": (hoping, "Freezing"),
    "a checkpoint under way": (saving, "Training"),
    "suspending": (suspending, "Completing"),
    "finishing": (finishing, "Finishing"),
    "completing": (completing, "Completing"),
    "ending": (ending, "Ending"),
    "ended": (ended, "Ended"),
}

EDGE = m.Edge(peer="m3.0.1-4", reason="reset")


def worker_bodies(name: str, number: int) -> Iterator[m.FromWorkerBody]:
    version = m.Version(step=2, lineage=1)
    yield m.WorkerUp(incarnation=name, host="h", port=1, pid=1)
    yield m.Tracked(incarnation=name, rank=0, identity="all", names_digest=1)
    yield m.StandbyReady(
        incarnation=name,
        as_rank=0,
        identity="all",
        attempts=2,
        sequence_digest="s",
        can_adopt_in_place=True,
    )
    yield m.StandbyFailed(incarnation=name, reason="x")
    yield m.LossAlarm(incarnation=name, rank=0, version=version, kind="stuck", text="x")
    yield m.Broken(incarnation=name, generation=1, step=2, edges=(EDGE,))
    yield m.Report(incarnation=name, number=number, generation=1, rank=0, applied=version)
    yield m.AtBoundary(incarnation=name, number=number, version=version)
    yield m.PhaseOneReady(incarnation=name, number=number)
    yield m.PhaseOneFailed(incarnation=name, number=number, edge=EDGE)
    yield m.Done(incarnation=name, number=number, version=version)
    yield m.Lost(incarnation=name, number=number, edge=EDGE)
    yield m.CommitAcknowledged(incarnation=name, number=number)
    yield m.FirstGate(incarnation=name, generation=number, step=2)
    yield m.FinishPassed(incarnation=name, generation=number, step=3)
    for was_running_out, is_machine_caused in ((False, False), (True, False), (False, True)):
        yield m.ScriptFailed(
            incarnation=name,
            rank=0,
            step=2,
            text="t",
            error="e",
            was_running_out=was_running_out,
            is_machine_caused=is_machine_caused,
        )
    yield m.StepLogged(incarnation=name, step=2, lineage=1, values=())
    yield m.SnapshotFailed(incarnation=name, rank=0, version=version, reason="x")
    yield m.Finding(incarnation=name, rank=0, kind="k", text="t")
    yield m.LinkLost(incarnation=name, reason="x", code=4)


def events(stage: Stage) -> Iterator[controller.Event]:
    names = [*sorted(stage.state.workers)[:6], "m0.0.0-9"]
    for name in names:
        machine = name.split(".")[0]
        for number in (1, 2, 3, 9):
            for body in worker_bodies(name, number):
                message = m.FromWorker(machine=machine, incarnation=name, body=body)
                yield controller.FromAgent(machine=machine, body=message)
        for agent_body in agent_bodies(machine, name):
            yield controller.FromAgent(machine=machine, body=agent_body)
    for machine in ("m0", "m4", "m9"):
        yield controller.AgentLinked(machine=machine)
        yield controller.AgentUnlinked(machine=machine)
        yield controller.FromAgent(
            machine=machine, body=m.AgentHello(machine=machine, incarnation="new")
        )
    yield controller.FromOperator(body=m.SwitchoverRequest(request="z", machines=("m2",)))
    yield controller.FromOperator(body=m.StopRequest(request="z", mode="boundary"))
    yield controller.FromOperator(body=m.StopRequest(request="z", mode="now"))
    hurried = m.StopRequest(request="z", mode="boundary", grace_s=5.0)
    yield controller.FromOperator(body=hurried)
    notice = m.PreemptionNotice(request="z", machines=("m2",), grace_s=5.0)
    yield controller.FromOperator(body=notice)
    yield controller.FromOperator(body=m.SaveRequest(request="z"))
    yield controller.Tick()


def agent_bodies(machine: str, name: str) -> Iterator[m.FromAgentMessage]:
    status = m.WorkerStatus(incarnation=name, local_rank=0, pid=1, process_state="T")
    yield m.Heartbeat(machine=machine, incarnation="a", workers=(status,))
    yield m.Heartbeat(machine=machine, incarnation="a")
    yield m.WorkerStarted(machine=machine, incarnation=name, local_rank=0, pid=1)
    yield m.WorkerLaunchFailed(machine=machine, incarnation=name, reason="x")
    yield m.WorkerExited(machine=machine, incarnation=name, exit_code=1, signal=None)
    yield m.AgentLeaving(machine=machine, reason="SIGTERM")
    yield m.AgentLeaving(machine=machine, reason="SIGTERM", grace_s=5.0)
    for number in (0, 1, 2):
        version = at(2)
        yield m.SnapshotsHeld(
            machine=machine,
            incarnation=f"agent-{machine}",
            host="h",
            port=7,
            held=(held(number, version),),
            level=number + 1,
        )
        shard = m.ShardWritten(rank=0, record="{}")
        yield m.ShardsWritten(
            machine=machine, number=number, version=version, shards=(shard,), seconds=0.1
        )
        yield m.CheckpointFailed(machine=machine, number=number, version=version, reason="x")
        yield m.CheckpointCommitted(machine=machine, number=number, version=version, name="n")


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_breaks(phase: str) -> None:
    build, name = PHASES[phase]
    stage = build()
    assert stage.phase == name
    for event in events(stage):
        for later_s in (0, 7, 400):
            now = Instant(stage.now + seconds(later_s))
            moved = controller.transition(stage.state, event, now)
            assert controller.violations(moved.state) == (), event
            again = controller.transition(moved.state, event, now)
            assert controller.violations(again.state) == (), event
            is_over = any(isinstance(c, controller.EndJob) for c in (*moved.commands,))
            is_over |= any(isinstance(c, controller.EndJob) for c in again.commands)
            deadline = controller.next_deadline(again.state)
            assert (deadline is None) == (is_over or name == "Ended"), event
            controller.status(again.state, now)
