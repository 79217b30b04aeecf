"""The command line: bad input is one clear line and a non-zero exit code, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.cli.app import commands, main
from trainmover.daemons.run_directory import BASE_VARIABLE
from trainmover.protocol import exits
from trainmover.protocol.phases import PHASES


@pytest.fixture(autouse=True)
def no_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path))


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == exits.BAD_USAGE
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in commands())


@pytest.mark.parametrize("name", commands())
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "did you mean 'status'" in complaint(capsys, "statsu")


def test_a_missing_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no script at nothing.py" in complaint(capsys, "run", "nothing.py")


def test_an_unknown_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shown = complaint(capsys, "run", "--set", "worker.treads=2", __file__)
    assert "did you mean 'worker.threads'" in shown


def test_a_wrong_count_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--machines: expected at least 1" in complaint(
        capsys, "run", "--machines", "0", __file__
    )


def test_no_running_job_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no job is running" in complaint(capsys, "status")


def test_switchover_to_itself_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "to itself: m1" in complaint(capsys, "switchover", "m1", "--to", "m1")


def test_an_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nonsense" in complaint(capsys, "status", "--nonsense")


def test_phases_are_printed_from_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["phases"]) == 0
    shown = capsys.readouterr().out
    assert all(phase.name in shown for phase in PHASES)


def test_printed_settings_can_be_read_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "c.toml").write_text(first)
    assert main(["config", str(tmp_path / "c.toml")]) == 0
    assert capsys.readouterr().out == first
