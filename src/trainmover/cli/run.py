"""`trainmover run`: train a script; machines are played on this host, or on one host each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmover.cli.grace import (
    GraceOption,
    TopologyOption,
    end_of_allocation_s,
    grace_text,
    read_labels,
)
from trainmover.cli.hosts import HostPlan, run_on_hosts
from trainmover.cli.run_options import (
    UNLIMITED,
    Assignments,
    Checkpoints,
    JobName,
    LocalCheckpoints,
    MaxRestarts,
    Nnodes,
    NodeRank,
    NprocPerNode,
    RdzvEndpoint,
    RehearsalWrites,
    RehearseWith,
    Resume,
    ShowsWorkerLogs,
)
from trainmover.cli.screen import ConsoleScreen
from trainmover.cli.worker_logs import WorkerLogs
from trainmover.daemons import settings as settings_of
from trainmover.daemons.resume import check_resume
from trainmover.daemons.run_directory import RunDirectory, base_directory, check_job_name
from trainmover.daemons.supervisor import JobPlan, Supervisor
from trainmover.edges import probes
from trainmover.edges.launcher import log_tail
from trainmover.errors import ConfigError
from trainmover.protocol import exits
from trainmover.protocol.addresses import parse_address
from trainmover.topology.keeping import read_keeping

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
TAIL_LINES = 40


def run(
    script: Annotated[Path, typer.Argument(help="training script; its arguments follow")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script")] = None,
    machines: Annotated[int, typer.Option(help="machines to play on this host")] = 1,
    standby: Annotated[int, typer.Option(help="standby machines to play beside them")] = 0,
    nproc_per_node: NprocPerNode = 1,
    nnodes: Nnodes = 0,
    rdzv_endpoint: RdzvEndpoint = "",
    node_rank: NodeRank = -1,
    max_restarts: MaxRestarts = UNLIMITED,
    config: Annotated[Path | None, typer.Option(help="settings, a TOML file")] = None,
    assignments: Assignments = None,
    run_dir: Annotated[Path | None, typer.Option(help="where the job keeps its files")] = None,
    job: JobName = "",
    checkpoints: Checkpoints = "",
    local_checkpoints: LocalCheckpoints = "",
    resume: Resume = "auto",
    token_file: Annotated[Path | None, typer.Option(help="the job's token; several hosts")] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="no progress line")] = False,
    rehearse_with: RehearseWith = "",
    rehearsal_writes: RehearsalWrites = "",
    worker_logs: ShowsWorkerLogs = False,
    grace: GraceOption = "",
    topology: TopologyOption = None,
) -> int:
    """Train SCRIPT, surviving the loss of machines, with the numbers of an undisturbed run."""
    check_counts(machines=machines, standby=standby, nproc_per_node=nproc_per_node)
    check_script(script)
    flags = {
        "agent.grace_s": grace_text(grace),
        "rehearsal.answers": rehearse_with,
        "rehearsal.writes": rehearsal_writes,
        "checkpoint.directory": checkpoint_place(checkpoints),
        "checkpoint.local_directory": checkpoint_place(local_checkpoints),
    }
    given = [f"{name}={value}" for name, value in flags.items() if value] + (assignments or [])
    settings = resolve_settings(config, given, max_restarts, machines * nproc_per_node)
    check_resume(resume, read_keeping(settings_of.flatten(settings)))
    directory = choose_directory(script, job, run_dir)
    if nnodes > 0 or rdzv_endpoint:
        return run_on_hosts(
            HostPlan(
                script=script,
                arguments=tuple(arguments or ()),
                node_count=nnodes or 1,
                node_rank=node_rank,
                standbys=standby,
                workers_per_machine=nproc_per_node,
                endpoint=_endpoint(nnodes, rdzv_endpoint),
                directory=directory,
                token_file=token_file,
                settings=settings_of.flatten(settings),
                resume=resume,
                topology=read_labels(topology),
            )
        )
    plan = JobPlan(
        script=str(script),
        arguments=tuple(arguments or ()),
        machines=machines,
        standbys=standby,
        workers_per_machine=nproc_per_node,
        job=job or directory.path.name,
        run_directory=directory.path,
        settings=settings_of.flatten(settings),
        resume=resume,
        topology=read_labels(topology),
        ends_at_wall_s=end_of_allocation_s(),
    )
    logs = WorkerLogs(directory.logs) if worker_logs else None
    return run_here(plan, ConsoleScreen(logs, shows_progress=not no_progress), worker_logs)


def check_script(script: Path) -> None:
    """Raises ConfigError where there is none."""
    if not script.is_file() and str(script).startswith("-"):
        raise ConfigError(f"no such option: {script}; `trainmover run --help` lists all")
    if not script.is_file():
        raise ConfigError(f"no script at {script}")


def check_names(places: Sequence[tuple[str, object]], names: tuple[str, ...]) -> None:
    """Raises ConfigError for a topology of other machines than those that are played."""
    others = [name for name, _ in places if name not in names]
    if others:
        played = ", ".join(names)
        raise ConfigError(f"--topology names {', '.join(others)}; this job plays {played}")


def checkpoint_place(text: str) -> str:
    """A directory as all processes find it; a URL as it is."""
    return text if "://" in text or not text else str(Path(text).resolve())


def run_here(plan: JobPlan, screen: ConsoleScreen, shows_logs: bool) -> int:
    """Play all machines on this host; the job's exit code."""
    check_names(plan.topology, plan.machine_names)
    supervisor = Supervisor(plan, screen)
    screen.line("start", f"job {plan.job}: files in {plan.run_directory}")
    code = supervisor.run()
    report_end(supervisor, code, has_shown_logs=shows_logs)
    return code


def check_counts(**counts: int) -> None:
    """Raises ConfigError for a count below what makes sense."""
    for name, value in counts.items():
        least = 0 if name == "standby" else 1
        if value < least:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: expected at least {least}, got {value}")


def _endpoint(nnodes: int, text: str) -> tuple[str, int]:
    if not text:
        raise ConfigError(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT, the controller's")
    return parse_address(text)


def resolve_settings(
    config: Path | None, assignments: list[str], max_restarts: int, worker_count: int
) -> dict[str, settings_of.Scalar]:
    """All settings of the job. Raises ConfigError."""
    layers: list[dict[str, Any]] = [
        {"worker.threads": probes.default_threads(worker_count)},
        settings_of.read_toml(config) if config is not None else {},
    ]
    if max_restarts < UNLIMITED:
        raise ConfigError(f"--max-restarts: expected at least 0, got {max_restarts}")
    if max_restarts != UNLIMITED:
        layers.append({"controller.max_incidents": max_restarts})
    layers.append(settings_of.read_assignments(assignments))
    return settings_of.resolve(*layers)


def choose_directory(script: Path, job: str, run_dir: Path | None) -> RunDirectory:
    """Run directory of a new job. Raises ConfigError when its name is taken."""
    if run_dir is not None:
        return RunDirectory(run_dir.resolve())
    base = base_directory()
    if job:
        check_job_name(job)
        if (base / job / "journal.sqlite").exists():
            raise ConfigError(f"a job '{job}' has run already ({base / job}); choose another name")
        return RunDirectory(base / job)
    stem = re.sub(r"[^A-Za-z0-9]+", "-", script.stem).strip("-")[:40] or "job"
    return RunDirectory(base / f"{stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}")


def report_end(supervisor: Supervisor, code: int, *, has_shown_logs: bool) -> None:
    """Say how it ended; after a failure of the script its traceback comes last on the screen."""
    outcome, failure = supervisor.outcome(), supervisor.failure()
    if code == exits.COMPLETED:
        typer.echo(f"completed: {outcome.step if outcome else '?'} steps", err=True)
        return
    if not has_shown_logs:
        show_tail(supervisor.directory, failure.rank if failure else -1)
    reason = outcome.reason if outcome is not None else exits.REASONS.get(code, f"code {code}")
    if failure is not None and code == exits.SCRIPT_FAILED:
        reason = f"{exits.REASONS[code]}: {failure.error}"
    typer.echo(f"the job ended with code {code}: {first_line(reason)}", err=True)
    typer.echo(f"logs: {supervisor.directory.logs}", err=True)
    if failure is not None and code == exits.SCRIPT_FAILED:
        where = f"rank {failure.rank} on {failure.machine}, step {failure.step}"
        typer.echo(f"\nfirst exception of the script ({where}):\n{failure.text.rstrip()}", err=True)


def first_line(text: str) -> str:
    """First line of a text that may be empty."""
    return (text.splitlines() or [""])[0]


def show_tail(directory: RunDirectory, rank: int) -> None:
    """Last lines of the rank that failed."""
    from trainmover.cli.worker_logs import log_names

    for name in log_names(directory.logs)[::-1]:
        if rank >= 0 and name.rank == rank:
            for line in log_tail(name.path, 8000).splitlines()[-TAIL_LINES:]:
                typer.echo(f"{name.prefix} {line}", err=True)
            return
