"""`trainmover status`: how a running job is."""

from __future__ import annotations

from typing import Any

import typer

from trainmover.cli import operator
from trainmover.cli.screen import progress_text

STANDBY_COLUMNS = ("machine", "incarnation", "local_rank", "is_ready", "as_rank", "reason")
"""What fits a terminal; the rest is said in words."""


def status(
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
    controller: operator.ControllerOption = None,
    token_file: operator.TokenOption = None,
    as_json: operator.JsonOption = False,
) -> None:
    """Generation, step, who plays which rank, and which standbys are ready."""
    client = operator.connect(job, run_dir, controller, token_file)
    view = client.get("status")
    client.close()
    if as_json:
        operator.print_json(view)
        return
    typer.echo(progress_text(view["status"], view["last"]))
    found = view["status"]
    typer.echo(f"{found['job']}: {found['word']}; {found['incident_count']} incidents")
    show_table(found["ranks"], "ranks")
    narrow = [{name: row[name] for name in STANDBY_COLUMNS} for row in found["standbys"]]
    show_table(narrow, "standbys")
    for line in rehearsal_lines(found["standbys"]):
        typer.echo(line)
    show_table(found["machines"], "machines")
    for line in kept_lines(found):
        typer.echo(line)
    for line in cadence_lines(view.get("cadence")):
        typer.echo(line)
    if view["findings"]:
        typer.echo(f"{view['findings']} findings: see console.jsonl in the run directory")


def rehearsal_lines(standbys: list[dict[str, Any]]) -> list[str]:
    """What each ready standby has rehearsed, and what that has cost the others."""
    lines = []
    for row in standbys:
        if not row["is_ready"]:
            continue
        count = len(row["classes"])
        classes = f"{count} role class" if count == 1 else f"{count} role classes"
        cost = f"; a step took {row['slowdown']:.2f} times as long" if row["slowdown"] else ""
        lines.append(f"  {row['incarnation']} rehearsed {classes} ({row['answers']}){cost}")
        lines += [f"    not rehearsed: {text}" for text in row["not_rehearsed"]]
    return lines


def kept_lines(found: dict[str, Any]) -> list[str]:
    """What the job could be restored from."""
    lines = []
    if found["snapshot_step"] >= 0:
        copied = found["snapshot_copied_step"]
        are_late = 0 <= copied < found["snapshot_step"]
        where = f", with all its copies: step {copied}" if are_late else ""
        lines.append(f"newest snapshot in memory: step {found['snapshot_step']}{where}")
    if found["snapshot_copies"]:
        lines.append(f"copies: {found['snapshot_copies']}")
    if found["snapshot_worth"]:
        lines.append(found["snapshot_worth"])
    if found["checkpoint_step"] >= 0:
        age_s = found["checkpoint_age_s"]
        age = f", {age_s:.0f} s old" if age_s >= 0 else ""
        name = found["checkpoint_name"]
        lines.append(f"newest checkpoint: step {found['checkpoint_step']} ({name}){age}")
    if found["disk_step"] >= 0:
        lines.append(f"newest checkpoint on machines' disks: step {found['disk_step']}")
    if found["disk_failure"]:
        lines.append(f"machines' disks: {found['disk_failure']}")
    if found["checkpoint_state"]:
        lines.append(f"checkpoint: {found['checkpoint_state']}")
    return lines


def cadence_lines(chosen: dict[str, Any] | None) -> list[str]:
    """How often state is saved, why, and what that costs."""
    if chosen is None:
        return []
    lines = []
    if chosen["snapshot_interval_s"] >= 0:
        lines.append(f"snapshots: every {chosen['snapshot_interval_s']:.1f} s")
    if chosen["checkpoint_interval_s"] >= 0:
        lines.append(
            f"checkpoints: every {chosen['checkpoint_interval_s']:.1f} s ({chosen['reason']}); "
            f"{100 * chosen['blocked_share']:.2f} % of the time, "
            f"{chosen['terabytes_per_hour']:.3g} TB/h, newest at most {chosen['age_s']:.0f} s old"
        )
    return lines


def show_table(rows: list[dict[str, Any]], title: str) -> None:
    """Rows of equal keys, under a title; nothing for no rows."""
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(_cell(row.get(name, "")) for name in names))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
