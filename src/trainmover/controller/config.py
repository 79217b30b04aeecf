"""Time-outs and limits of the controller."""

from __future__ import annotations

from dataclasses import dataclass

from trainmover.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What the controller waits for, how long, and how often it tries."""

    machine_names: tuple[str, ...] = ()
    """Machines in rank order, standbys behind; empty: names in natural order as they register."""
    standby_machines: int = 0
    """Standbys to wait for at the start; more may come at any time."""
    start_timeout_s: float = 300.0
    """From the start to the first committed generation; longer tolerates slow imports."""
    gather_s: float = 5.0
    """How long a complete set of active machines waits for named ones or standbys to register."""
    lost_after_s: float = 10.0
    """Silence of a machine, without any gate passing, after which it counts as lost."""
    alone_timeout_s: float = 360.0
    """Silence of every agent after which the job ends: without a controller they and their workers
    have given up by then."""
    missing_after_s: float = 2.0
    """How long a worker may be absent from its agent's heartbeats before it counts as exited."""
    stopped_limit_s: float = 3.0
    """How long a worker may be stopped (state T) before it is replaced."""
    report_timeout_s: float = 5.0
    """From a freeze to the exclusion of whoever has not reported."""
    tail_timeout_s: float = 600.0
    """From the start of an incident, how long a rank that says it is behind a gate (it saves, it
    evaluates) is waited for; shorter ends a tail that hangs sooner."""
    link_grace_s: float = 0.3
    """How long a freeze waits for reports from a machine whose link has closed: an agent that is
    restarted later than that while another fault strikes costs its ranks a standby."""
    prepare_timeout_s: float = 120.0
    """Phase one of a planned switchover, while training goes on."""
    boundary_timeout_s: float = 60.0
    """From the raised flag to the stop of every rank at the boundary."""
    cut_over_timeout_s: float = 60.0
    """From the plan to the last Done; bounds the move of state."""
    joiner_timeout_s: float = 120.0
    """From the launch of a worker to its readiness as a joiner."""
    recording_wait_s: float = 300.0
    """How long a standby waits, from its launch, for the members' first iterations to be recorded
    before it rehearses in loop-back; a loss ends the wait at once. Longer spares a job whose first
    steps compile for minutes the competition of its own standbys."""
    reap_timeout_s: float = 10.0
    """From the order to kill a worker to the use of a standby because its end is not seen."""
    machine_wait_s: float = 60.0
    """How long a lost rank waits for a machine when no standby is left; then the job stops."""
    release_timeout_s: float = 10.0
    """From a commit to the release of leavers if no first gate is heard of; then to their end."""
    complete_timeout_s: float = 60.0
    """From the first finish gate to the end of all workers; code behind the loop runs in it."""
    stop_timeout_s: float = 8.0
    """From the order to stop to the end of the controller, however many agents still linger."""
    failure_grace_s: float = 0.5
    """How long a script's exception waits for earlier ones, so that the first is named."""
    marks_grace_s: float = 2.0
    """How long an incident's report waits for the marks of ranks after the first first gate."""
    resend_interval_s: float = 1.0
    """How often an unanswered message is sent again."""
    max_incidents: int = 100
    """Incidents after which the job stops; several losses in one freeze are one incident."""
    max_tries: int = 3
    """Tries of one kind of recovery for one rank at one step."""
    may_reconnect: bool = True
    """Whether broken connections between live workers are made again without a process restart."""
    may_respawn: bool = True
    """Whether an ended worker is started again on its own machine before a standby is used."""
    do_standbys_rehearse: bool = True
    """Whether standbys build `main` and walk through it ahead of a loss; false: a standby is a
    started process until it is needed. Only there to measure what rehearsal is worth (`bench
    ablation`): planned switchovers then find no standby."""
    return_to_pool: bool = True
    """Whether a machine that left comes back as a standby."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name.endswith("_s") and value <= 0:
                raise ConfigError(f"controller.{name} must be above 0, got {value}")
        if self.max_incidents < 0:
            text = f"controller.max_incidents must be at least 0, got {self.max_incidents}"
            raise ConfigError(text)
        if self.max_tries < 1:
            raise ConfigError(f"controller.max_tries must be at least 1, got {self.max_tries}")
        self._check_order("resend_interval_s", "report_timeout_s")
        self._check_order("resend_interval_s", "lost_after_s")
        self._check_order("failure_grace_s", "report_timeout_s")
        self._check_order("report_timeout_s", "cut_over_timeout_s")
        self._check_order("report_timeout_s", "tail_timeout_s")

    def _check_order(self, shorter: str, longer: str) -> None:
        low, high = getattr(self, shorter), getattr(self, longer)
        if low >= high:
            text = f"controller.{shorter} ({low}) must be below controller.{longer} ({high})"
            raise ConfigError(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignTimeouts:
    """Time-outs of other owners that the controller's must fit."""

    heartbeat_interval_s: float
    gate_timeout_s: float
    run_out_timeout_s: float
    worker_controller_timeout_s: float
    agent_controller_timeout_s: float
    collective_timeout_s: float
    outside_step_limit_s: float
    tcp_user_timeout_s: float
    controller_restart_s: float = 10.0


def check_relations(config: Config, others: ForeignTimeouts) -> None:
    """Cross-check of all time-outs at the start of a job. Raises ConfigError naming both sides.

    The relations of the protocol's timers: heartbeats prove life faster than gates time out, a
    run-out and a report fit into an incident, and a worker outwaits a restart of the controller
    together with a whole incident. Each fault has a first finder: a cut cable the kernel, a stopped
    process its agent, a hang the peer that waits, and the gate's own limit what all those miss.
    """
    incident_s = config.report_timeout_s + config.joiner_timeout_s + config.cut_over_timeout_s
    relations = (
        (
            "agent.heartbeat_interval_s",
            others.heartbeat_interval_s,
            "worker.gate_timeout_s",
            others.gate_timeout_s,
        ),
        (
            "agent.heartbeat_interval_s",
            3 * others.heartbeat_interval_s,
            "controller.lost_after_s / 3",
            config.lost_after_s,
        ),
        (
            "worker.run_out_timeout_s + controller.report_timeout_s",
            others.run_out_timeout_s + config.report_timeout_s,
            "report + joiner + cut-over time-outs of the controller",
            incident_s,
        ),
        (
            "controller restart + report + joiner + cut-over time-outs",
            others.controller_restart_s + incident_s,
            "worker.controller_timeout_s",
            others.worker_controller_timeout_s,
        ),
        (
            "controller restart + controller.lost_after_s",
            others.controller_restart_s + config.lost_after_s,
            "agent.controller_timeout_s",
            others.agent_controller_timeout_s,
        ),
        (
            "agent.controller_timeout_s",
            others.agent_controller_timeout_s,
            "controller.alone_timeout_s",
            config.alone_timeout_s,
        ),
        (
            "controller.stopped_limit_s + 2 agent.heartbeat_interval_s",
            config.stopped_limit_s + 2 * others.heartbeat_interval_s,
            "communicator.collective_timeout_s",
            others.collective_timeout_s,
        ),
        (
            "communicator.tcp_user_timeout_s",
            others.tcp_user_timeout_s,
            "communicator.collective_timeout_s",
            others.collective_timeout_s,
        ),
        (
            "communicator.outside_step_limit_s + collective_timeout_s",
            others.outside_step_limit_s + others.collective_timeout_s,
            "worker.gate_timeout_s",
            others.gate_timeout_s,
        ),
    )
    for low_name, low, high_name, high in relations:
        if low >= high:
            text = f"{low_name} ({low:g} s) must be below {high_name} ({high:g} s); change one"
            raise ConfigError(text)
