"""`trainmover incidents`: every switchover so far, from first sign to the first new step."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from trainmover.cli import operator
from trainmover.daemons.records import describe_missed, read_lines
from trainmover.daemons.run_directory import find_job, is_running
from trainmover.protocol.journal import CheckpointMissed, IncidentReport
from trainmover.protocol.messages import Coverage, RestoreChecked


def incidents(
    number: Annotated[int | None, typer.Argument(help="generation; default: all")] = None,
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
    controller: operator.ControllerOption = None,
    token_file: operator.TokenOption = None,
    as_json: operator.JsonOption = False,
) -> int:
    """What happened, who was replaced by whom, how long each phase took."""
    found = reports(job, run_dir, controller, token_file)
    failed = missed(job, run_dir, controller, token_file) if number is None else []
    if number is not None:
        found = [report for report in found if report["number"] == number]
    if as_json:
        operator.print_json(found)
    elif not found:
        typer.echo("no incident" if number is None else f"no incident {number}")
    else:
        unseen = coverage(job, run_dir, controller, token_file)
        compared = _fetch("checks", RestoreChecked, (job, run_dir, controller, token_file))
        for report in found:
            show(report, [told for told in unseen if told["generation"] == report["number"]])
            show_checks([told for told in compared if told["generation"] == report["number"]])
    if not as_json:
        for one in failed:
            typer.echo(describe_missed(msgspec.convert(one, CheckpointMissed)))
    return 0 if found or number is None else 1


def reports(
    job: str | None, run_dir: Any, controller: str | None, token_file: Any
) -> list[dict[str, Any]]:
    """Reports from the controller, or from the run directory of a job that has ended."""
    return _fetch("incidents", IncidentReport, (job, run_dir, controller, token_file))


def coverage(
    job: str | None, run_dir: Any, controller: str | None, token_file: Any
) -> list[dict[str, Any]]:
    """What joiners' rehearsals had not seen, oldest first."""
    return _fetch("coverage", Coverage, (job, run_dir, controller, token_file))


def missed(
    job: str | None, run_dir: Any, controller: str | None, token_file: Any
) -> list[dict[str, Any]]:
    """Checkpoints that could not be made, oldest first: no incidents, training went on."""
    return _fetch("missed", CheckpointMissed, (job, run_dir, controller, token_file))


def _fetch(
    what: str,
    kind: type[msgspec.Struct],
    where: tuple[str | None, Any, str | None, Any],
) -> list[dict[str, Any]]:
    job, run_dir, controller, token_file = where
    if controller is None:
        directory = find_job(job, run_dir)
        if not is_running(directory):
            lines = read_lines(directory.path / f"{what}.jsonl", kind)
            return [msgspec.to_builtins(line) for line in lines]
    client = operator.connect(job, run_dir, controller, token_file)
    found: list[dict[str, Any]] = client.get(what)
    client.close()
    return found


def show(report: dict[str, Any], unseen: list[dict[str, Any]]) -> None:
    """One report for people, with what the joiners' rehearsals had not seen."""
    typer.echo(f"generation {report['number']}: {report['kind']}: {report['reason']}")
    for culprit in report["culprits"]:
        typer.echo(
            f"  rank {culprit['rank']} on {culprit['machine']} ({culprit['incarnation']}): "
            f"{culprit['evidence']}"
        )
    previous = 0
    for phase in report["phases"]:
        after_ms, took_ms = phase["after_ns"] / 1e6, (phase["after_ns"] - previous) / 1e6
        previous = phase["after_ns"]
        last = f", last: {phase['waited_for']}" if phase.get("waited_for") else ""
        typer.echo(f"  {phase['name']:<22} at {after_ms:9.1f} ms  (+{took_ms:.1f}{last})")
    for role in report["roles"]:
        if role["before"] != role["incarnation"]:
            source = f", state from {role['source']}" if role["source"] else ""
            source += f" on {role['served_by']}" if role.get("served_by") else ""
            how = f", adopted {role['adopted']}" if role["adopted"] else ""
            typer.echo(
                f"  rank {role['rank']}: {role['before'] or 'nobody'} -> {role['incarnation']} "
                f"on {role['machine']}{source}{how}, {role['bytes_received']} bytes"
            )
            if slowdown := role.get("slowdown"):
                typer.echo(f"    a step took {slowdown:.2f} times as long while it rehearsed")
    _show_classes(report)
    for told in unseen:
        for part in told.get("parts", ()):
            at = f" before step {part['step']} ended" if part["step"] >= 0 else ""
            typer.echo(
                f"  rank {told['rank']} had not rehearsed{at}: {part['kind']} {part['what']}, "
                f"{part['ms']:.1f} ms"
            )
    typer.echo(
        f"  resumed at step {report['resumed_step']}, steps repeated: {report['steps_repeated']}. "
        f"{report['outcome']}"
    )


def show_checks(checks: list[dict[str, Any]]) -> None:
    """What was compared behind a restore, for people."""
    for check in checks:
        mark = "MISMATCH" if check.get("differing") else "check"
        typer.echo(f"  {mark}, {check['source']}: {check['text']}")


def _show_classes(report: dict[str, Any]) -> None:
    classes: dict[str, list[int]] = {}
    for role in report["roles"]:
        if role["role_class"]:
            classes.setdefault(role["role_class"], []).append(role["rank"])
    for digest, ranks in classes.items():
        typer.echo(f"  role class {digest}: ranks {', '.join(map(str, ranks))}")
