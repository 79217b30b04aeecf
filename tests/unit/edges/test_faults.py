"""Fault rules: what fires, where, when; nothing fires without the variable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainmover.edges import faults
from trainmover.errors import ConfigError


@pytest.fixture(autouse=True)
def forget_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    monkeypatch.delenv(faults.MARKS_VARIABLE, raising=False)
    yield
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.reload()


def use(monkeypatch: pytest.MonkeyPatch, rules: str) -> None:
    monkeypatch.setenv(faults.VARIABLE, rules)
    faults.reload()


def test_nothing_happens_without_rules() -> None:
    faults.reload()
    faults.reached("prepare", "m0.0.1", 3)


def test_a_rule_fires_for_its_phase_victim_and_generation_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, "raise@delta_swapped:m1:2")
    faults.reached("delta_swapped", "m0.0.1", 2)
    faults.reached("delta_swapped", "m10.0.1", 2)
    faults.reached("delta_swapped", "m1.0.1", 1)
    faults.reached("prepare", "m1.0.1", 2)
    with pytest.raises(faults.InjectedFault):
        faults.reached("delta_swapped", "m1.0.1", 2)
    faults.reached("delta_swapped", "m1.0.1", 2)


def test_the_count_chooses_the_passage(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "raise@detected:*:*:3")
    faults.reached("detected")
    faults.reached("detected")
    with pytest.raises(faults.InjectedFault):
        faults.reached("detected")


def test_marks_keep_a_rule_spent_over_restarts(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv(faults.MARKS_VARIABLE, str(tmp_path_factory.mktemp("marks")))
    use(monkeypatch, "raise@decided")
    with pytest.raises(faults.InjectedFault):
        faults.reached("decided")
    faults.reload()  # as a restarted process would
    faults.reached("decided")


@pytest.mark.parametrize("text", ["kill", "explode@prepare", "kill@", "kill@prepare:m0:x"])
def test_a_rule_that_can_not_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split("@", maxsplit=1)[0]):
        faults.parse(text)
