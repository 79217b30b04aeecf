"""What a worker's process is given when it is launched: files, environment, secret."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainmover.daemons.options import AgentOptions
from trainmover.daemons.run_directory import RunDirectory
from trainmover.edges import seal
from trainmover.protocol.messages import JobSpec, WorkerLaunch
from trainmover.protocol.nursery import ForkRequest

NOT_FOR_WORKERS = (seal.TOKEN_VARIABLE,)
LOCAL = "checkpoint.local_directory"


def fork_request(
    options: AgentOptions,
    launch: WorkerLaunch,
    spec: JobSpec,
    *,
    token: str,
    agent_socket: str,
    progress_path: str,
) -> ForkRequest:
    """The nursery's order for one worker of this machine."""
    directory = RunDirectory(Path(options.run_directory))
    return ForkRequest(
        incarnation=launch.incarnation,
        local_rank=launch.local_rank,
        machine=options.machine,
        host=options.host,
        spec=msgspec.structs.replace(
            spec,
            log_directory=str(directory.logs),
            settings=own_settings(options, spec.settings),
        ),
        agent_socket=agent_socket,
        secret=seal.channel_secret(token, spec.run_id),
        progress_path=progress_path,
        log_path=str(directory.worker_log(launch.incarnation)),
        environment=tuple(sorted(environment(options.machine, launch, spec, os.environ).items())),
    )


def own_settings(
    options: AgentOptions, settings: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """The job's settings, with this machine's own disk where its agent was told another one."""
    own = dict(options.settings).get(LOCAL, "")
    if not own or not dict(settings).get(LOCAL, ""):
        return settings
    return tuple((name, own if name == LOCAL else value) for name, value in settings)


def environment(
    machine: str, launch: WorkerLaunch, spec: JobSpec, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables of a worker: the agent's, the job's, and what torchrun would set."""
    # The job's value, not this machine's: sums must be split alike everywhere.
    threads = dict(spec.settings).get("worker.threads", "1")
    variables = {name: value for name, value in inherited.items() if name not in NOT_FOR_WORKERS}
    variables.update(dict(spec.environment))
    variables.update(
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(spec.workers_per_machine),
        WORLD_SIZE=str(spec.world_size),
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        TRAINMOVER_JOB=spec.job,
        TRAINMOVER_RUN_ID=spec.run_id,
        TRAINMOVER_MACHINE=machine,
        TRAINMOVER_INCARNATION=launch.incarnation,
        TORCHELASTIC_RUN_ID=spec.run_id,
    )
    return variables
