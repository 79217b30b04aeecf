"""Settings: one namespace, unknown names refused with the nearest, types and relations checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.daemons import settings
from trainmover.errors import ConfigError


def test_defaults_fit_each_other() -> None:
    assert settings.resolve()["controller.lost_after_s"] == 10.0


def test_a_later_layer_wins() -> None:
    resolved = settings.resolve({"worker.threads": 2}, {"worker.threads": "3"})
    assert resolved["worker.threads"] == 3


def test_flattened_settings_come_back_with_their_types() -> None:
    resolved = settings.resolve({"controller.machine_names": ("a", "b")})
    assert settings.unflatten(settings.flatten(resolved)) == resolved


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'worker.treads'; did you mean 'worker.threads'"):
        settings.resolve({"worker.treads": 2})


@pytest.mark.parametrize(
    "name, value", [("worker.threads", "x"), ("worker.threads", 1.5), ("worker.does_scan", "maybe")]
)
def test_a_value_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected"):
        settings.resolve({name: value})


def test_time_outs_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match=r"controller.report_timeout_s"):
        settings.resolve({"controller.report_timeout_s": 100.0})


def test_time_outs_of_different_owners_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"worker.gate_timeout_s"):
        settings.resolve({"worker.gate_timeout_s": 0.5, "agent.heartbeat_interval_s": 1.0})


def test_toml_sections_become_names(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[controller]\nmachine_names = ["a"]\nmax_tries = 2\n')
    resolved = settings.resolve(settings.read_toml(tmp_path / "c.toml"))
    assert resolved["controller.machine_names"] == ("a",)
    assert resolved["controller.max_tries"] == 2


def test_a_value_outside_a_section_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("max_tries = 2\n")
    with pytest.raises(ConfigError, match="expected a section"):
        settings.read_toml(tmp_path / "c.toml")


def test_set_needs_an_equals_sign() -> None:
    with pytest.raises(ConfigError, match=r"owner\.field=value"):
        settings.read_assignments(["worker.threads"])
