"""Stories of one machine's agent."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainmover import agent
from trainmover.protocol import exits
from trainmover.protocol import messages as m
from trainmover.units import Instant, seconds

SPEC = m.JobSpec(job="j", run_id="r", script="t.py", world_size=2, workers_per_machine=1)
LAUNCH = m.WorkerLaunch(incarnation="m0.0.1", local_rank=0, machine="m0")
ZERO = Instant(0)


@dataclass
class Host:
    """The agent's decider and what it asked for."""

    config: agent.Config = field(default_factory=agent.Config)
    live: tuple[m.WorkerStatus, ...] = ()
    now: Instant = ZERO
    done: list[agent.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        identity = agent.Identity(config=self.config, machine="m0", incarnation="a1")
        self.state = agent.initial_state(identity, self.now, self.live)

    def feed(self, *events: agent.Event) -> list[agent.Command]:
        """Events one after the other; the commands of all of them."""
        self.done = []
        for event in events:
            move = agent.transition(self.state, event, self.now)
            self.state = move.state
            self.done += move.commands
        return self.done

    def hear(self, *bodies: m.ToAgentMessage) -> list[agent.Command]:
        return self.feed(*(agent.FromController(body=body) for body in bodies))

    def wait(self, seconds_: float) -> list[agent.Command]:
        """Time passes in steps of half a second."""
        done: list[agent.Command] = []
        for _ in range(round(seconds_ * 2)):
            self.now = Instant(self.now + seconds(0.5))
            done += self.feed(agent.Tick())
        return done

    def welcomed(self, term: int = 1) -> Host:
        self.feed(agent.LinkUp())
        self.hear(m.Welcome(term=term, spec=SPEC))
        return self

    def with_worker(self) -> Host:
        self.welcomed()
        self.hear(m.LaunchWorkers(term=1, launches=(LAUNCH,)))
        self.feed(
            agent.ProcessStarted(incarnation="m0.0.1", pid=7),
            agent.WorkerLinked(incarnation="m0.0.1", local_rank=0, pid=7),
        )
        return self


def told(commands: list[agent.Command]) -> list[m.Message]:
    return [command.body for command in commands if isinstance(command, agent.ToController)]


def from_worker(body: m.FromWorkerBody) -> agent.FromWorkerLink:
    return agent.FromWorkerLink(incarnation="m0.0.1", body=body)


UP = m.WorkerUp(incarnation="m0.0.1", host="h", port=1, pid=7)


def test_hello_on_every_link_with_the_workers_that_live() -> None:
    host = Host().with_worker()
    host.feed(agent.LinkDown())
    (hello,) = told(host.feed(agent.LinkUp()))
    assert isinstance(hello, m.AgentHello)
    assert [w.incarnation for w in hello.workers] == ["m0.0.1"]


def test_launching_is_idempotent() -> None:
    host = Host().welcomed()
    order = m.LaunchWorkers(term=1, launches=(LAUNCH,))
    assert [type(c) for c in host.hear(order, order)] == [agent.Launch]
    host.feed(agent.ProcessStarted(incarnation="m0.0.1", pid=7))
    assert [type(b) for b in told(host.hear(order))] == [m.WorkerStarted]
    host.feed(agent.ProcessExited(incarnation="m0.0.1", exit_code=1))
    again = host.hear(order)
    assert [type(b) for b in told(again)] == [m.WorkerExited]
    assert not any(isinstance(c, agent.Launch) for c in again), "an ended life never comes back"


def test_a_launch_that_fails_is_told() -> None:
    host = Host().welcomed()
    host.hear(m.LaunchWorkers(term=1, launches=(LAUNCH,)))
    (body,) = told(host.feed(agent.LaunchFailed(incarnation="m0.0.1", reason="no memory")))
    assert isinstance(body, m.WorkerLaunchFailed) and body.reason == "no memory"


def test_the_process_group_is_killed_before_the_exit_is_told() -> None:
    host = Host().with_worker()
    commands = host.feed(agent.ProcessExited(incarnation="m0.0.1", signal=9))
    assert [type(c) for c in commands] == [agent.Kill, agent.ToController]


def test_an_exit_while_the_link_is_down_is_told_later_and_once() -> None:
    host = Host().with_worker()
    host.feed(agent.LinkDown())
    assert told(host.feed(agent.ProcessExited(incarnation="m0.0.1", signal=9))) == []
    host.feed(agent.LinkUp())
    bodies = told(host.hear(m.Welcome(term=1, spec=SPEC)))
    assert [type(b) for b in bodies if not isinstance(b, m.Heartbeat)] == [m.WorkerExited]
    host.feed(agent.LinkDown(), agent.LinkUp())
    bodies = told(host.hear(m.Welcome(term=1, spec=SPEC)))
    assert not any(isinstance(b, m.WorkerExited) for b in bodies)


def test_what_a_worker_says_once_is_kept_while_the_link_is_down_and_repeats_are_not() -> None:
    host = Host().with_worker()
    host.feed(agent.LinkDown())
    logged = m.StepLogged(incarnation="m0.0.1", step=3, lineage=1, values=())
    broken = m.Broken(incarnation="m0.0.1", generation=1, step=3, edges=())
    host.feed(from_worker(logged), from_worker(broken), agent.LinkUp())
    bodies = [b.body for b in told(host.hear(m.Welcome(term=2, spec=SPEC))) if _is_worker(b)]
    assert bodies == [logged]


def _is_worker(body: m.Message) -> bool:
    return isinstance(body, m.FromWorker)


def test_the_outbox_is_bounded() -> None:
    host = Host(config=agent.Config(outbox_limit=3)).with_worker()
    host.feed(agent.LinkDown())
    for step in range(5):
        host.feed(from_worker(m.StepLogged(incarnation="m0.0.1", step=step, lineage=1, values=())))
    assert len(host.state.outbox) == 3


def test_workers_are_introduced_to_a_controller_that_welcomes_us() -> None:
    host = Host().with_worker()
    ready = m.StandbyReady(
        incarnation="m0.0.1",
        as_rank=0,
        identity="i",
        attempts=2,
        sequence_digest="s",
        can_adopt_in_place=True,
    )
    host.feed(from_worker(UP), from_worker(ready), agent.LinkDown(), agent.LinkUp())
    bodies = told(host.hear(m.Welcome(term=2, spec=SPEC)))
    assert [b.body for b in bodies if isinstance(b, m.FromWorker)] == [UP, ready]


def test_only_the_highest_term_is_obeyed() -> None:
    host = Host().with_worker()
    host.hear(m.Welcome(term=3, spec=SPEC))
    assert host.hear(m.KillWorker(term=2, incarnation="m0.0.1", reason="old")) == []
    commands = host.hear(m.KillWorker(term=3, incarnation="m0.0.1", reason="new"))
    assert commands == [agent.Kill(incarnation="m0.0.1")]


def test_messages_go_through_unchanged() -> None:
    host = Host().with_worker()
    freeze = m.Freeze(term=1, number=4)
    commands = host.hear(m.ToWorker(term=1, incarnation="m0.0.1", body=freeze))
    assert commands == [agent.ToWorkerLink(incarnation="m0.0.1", body=freeze)]
    (body,) = told(host.feed(from_worker(UP)))
    assert body == m.FromWorker(machine="m0", incarnation="m0.0.1", body=UP)


def test_a_message_for_an_ended_worker_is_answered_with_its_end() -> None:
    host = Host().with_worker()
    host.feed(agent.ProcessExited(incarnation="m0.0.1", signal=9))
    order = m.ToWorker(term=1, incarnation="m0.0.1", body=m.Freeze(term=1, number=4))
    assert [type(b) for b in told(host.hear(order))] == [m.WorkerExited]


def test_a_kill_is_repeated_until_the_exit_is_seen() -> None:
    host = Host().with_worker()
    host.hear(m.KillWorker(term=1, incarnation="m0.0.1", reason="x"))
    again = [c for c in host.wait(5) if isinstance(c, agent.Kill)]
    assert len(again) == 2
    host.feed(agent.ProcessExited(incarnation="m0.0.1", signal=9))
    assert not [c for c in host.wait(5) if isinstance(c, agent.Kill)]


def test_a_kill_of_somebody_unknown_is_answered() -> None:
    host = Host().welcomed()
    commands = host.hear(m.KillWorker(term=1, incarnation="m0.0.gone", reason="x"))
    assert [type(c) for c in commands] == [agent.Kill, agent.ToController]


def test_heartbeats_carry_what_the_probe_saw() -> None:
    host = Host().with_worker()
    status = m.WorkerStatus(incarnation="m0.0.1", local_rank=0, pid=7, step=5, process_state="T")
    host.feed(agent.Pulse(workers=(status,)))
    beats = [b for b in told(host.wait(3)) if isinstance(b, m.Heartbeat)]
    assert len(beats) == 3 and beats[0].workers == (status,)


def test_a_restarted_agent_keeps_what_lives() -> None:
    status = m.WorkerStatus(incarnation="m0.0.1", local_rank=0, pid=7)
    host = Host(live=(status,))
    (hello,) = told(host.feed(agent.LinkUp()))
    assert isinstance(hello, m.AgentHello) and hello.workers == (status,)
    host.feed(agent.WorkerLinked(incarnation="m0.0.2", local_rank=1, pid=8))
    assert sorted(host.state.workers) == ["m0.0.1", "m0.0.2"]


def test_without_a_controller_workers_run_on_until_the_time_out() -> None:
    host = Host(config=agent.Config(controller_timeout_s=20)).with_worker()
    host.feed(agent.LinkDown())
    assert not [c for c in host.wait(19) if isinstance(c, agent.Kill | agent.Exit)]
    commands = host.wait(2)
    assert any(isinstance(c, agent.Kill) for c in commands)
    exited = host.feed(agent.ProcessExited(incarnation="m0.0.1", signal=9))
    assert exited[-1] == agent.Exit(code=exits.CONTROLLER_LOST, reason=exited[-1].reason)


def test_a_link_that_flaps_without_a_welcome_does_not_reset_the_time_out() -> None:
    host = Host(config=agent.Config(controller_timeout_s=20)).welcomed()
    host.feed(agent.LinkDown())
    for _ in range(5):
        host.wait(3)
        host.feed(agent.LinkUp(), agent.LinkDown())
    assert any(isinstance(c, agent.Exit) for c in host.wait(6))


def test_asked_to_stop_it_waits_for_the_planned_leave() -> None:
    host = Host().with_worker()
    (leaving,) = told(host.feed(agent.StopAsked(reason="SIGTERM")))
    assert leaving == m.AgentLeaving(machine="m0", reason="SIGTERM")
    repeated = [b for b in told(host.wait(2)) if isinstance(b, m.AgentLeaving)]
    assert len(repeated) == 2
    host.feed(agent.ProcessExited(incarnation="m0.0.1", exit_code=0))
    commands = host.hear(m.StopAgent(term=1, code=0, reason="left"))
    assert commands[-1] == agent.Exit(code=0, reason="left")


def test_the_wait_for_the_leave_is_bounded() -> None:
    host = Host(config=agent.Config(leave_timeout_s=5)).with_worker()
    host.feed(agent.StopAsked(reason="SIGTERM"))
    assert any(isinstance(c, agent.Kill) for c in host.wait(9))
    commands = host.wait(10)
    assert isinstance(commands[-1], agent.Exit) and commands[-1].code == exits.INTERRUPTED


def test_asked_twice_it_stops_at_once() -> None:
    host = Host().with_worker()
    host.feed(agent.StopAsked(reason="SIGTERM"), agent.StopAsked(reason="SIGTERM"))
    commands = host.feed(agent.StopAsked(reason="SIGTERM"))
    assert [type(c) for c in commands] == [agent.Kill]


def test_the_end_of_the_job_ends_workers_gently_then_firmly() -> None:
    host = Host().with_worker()
    commands = host.hear(m.StopAgent(term=1, code=1, reason="script failed", grace_s=2))
    assert commands == [
        agent.ToWorkerLink(
            incarnation="m0.0.1", body=m.StopNow(term=1, code=1, reason="script failed")
        )
    ]
    assert any(isinstance(c, agent.Kill) for c in host.wait(3))
    exited = host.feed(agent.ProcessExited(incarnation="m0.0.1", signal=9))
    assert exited[-1] == agent.Exit(code=1, reason="script failed")
    assert agent.next_deadline(host.state) is None


def test_a_refused_agent_exits_with_the_reason() -> None:
    host = Host()
    host.feed(agent.LinkUp())
    commands = host.hear(m.Refused(term=1, reason="m0: torch: expected 2.13", code=7))
    assert commands[-1].code == 7 and "expected 2.13" in commands[-1].reason


def test_some_deadline_is_always_pending_until_the_end() -> None:
    host = Host()
    assert agent.next_deadline(host.state) is not None
    host.welcomed()
    assert agent.next_deadline(host.state) == host.state.heartbeat_at
