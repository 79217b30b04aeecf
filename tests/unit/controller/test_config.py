"""Limits of the controller: relations among them and with other owners' time-outs."""

from __future__ import annotations

import pytest

from trainmover import controller
from trainmover.errors import ConfigError

OTHERS = controller.ForeignTimeouts(
    heartbeat_interval_s=1.0,
    gate_timeout_s=700.0,
    run_out_timeout_s=10.0,
    worker_controller_timeout_s=300.0,
    agent_controller_timeout_s=300.0,
    collective_timeout_s=60.0,
    outside_step_limit_s=600.0,
    tcp_user_timeout_s=20.0,
)


def test_defaults_fit_each_other() -> None:
    controller.check_relations(controller.Config(), OTHERS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"report_timeout_s": 0.0}, "report_timeout_s must be above 0"),
        ({"resend_interval_s": 6.0}, "resend_interval_s (6.0) must be below"),
        ({"report_timeout_s": 70.0}, "report_timeout_s (70.0) must be below"),
        ({"max_tries": 0}, "max_tries must be at least 1"),
        ({"max_incidents": -1}, "max_incidents must be at least 0"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        controller.Config(**changes)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heartbeat_interval_s": 4.0}, "controller.lost_after_s"),
        ({"gate_timeout_s": 0.5}, "worker.gate_timeout_s"),
        ({"run_out_timeout_s": 500.0}, "worker.run_out_timeout_s"),
        ({"worker_controller_timeout_s": 30.0}, "worker.controller_timeout_s (30 s)"),
        ({"agent_controller_timeout_s": 15.0}, "agent.controller_timeout_s (15 s)"),
        ({"agent_controller_timeout_s": 400.0}, "controller.alone_timeout_s (360 s)"),
        ({"collective_timeout_s": 4.0}, "communicator.collective_timeout_s (4 s)"),
        ({"tcp_user_timeout_s": 90.0}, "communicator.tcp_user_timeout_s (90 s)"),
        ({"outside_step_limit_s": 900.0}, "communicator.outside_step_limit_s"),
    ],
)
def test_relations_across_owners_name_both_sides(changes: dict[str, float], words: str) -> None:
    known = {name: getattr(OTHERS, name) for name in OTHERS.__dataclass_fields__}
    with pytest.raises(ConfigError) as raised:
        controller.check_relations(
            controller.Config(), controller.ForeignTimeouts(**{**known, **changes})
        )
    assert words in str(raised.value)
