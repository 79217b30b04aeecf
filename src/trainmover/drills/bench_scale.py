"""`bench scale`: does a switchover cost a stayer more when the job has more machines?

Decides what is counted on a stayer's critical path, from its stop to the commit: messages to and
from the controller, connections opened, bytes of state moved. These must be equal from the fewest
machines to the most, else the command exits with 1. What does grow is told beside them and not
judged: frames on kept channels (one per channel: log2 of the ranks), personal state for the two
backups (one, where there is only one other machine), and wall time on a host with too few cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file, core_share, held_job
from trainmover.drills.baseline import read_events
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.bench_recovery import median_step_s
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import JobShape
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.errors import TrainMoverError

HOLD_AT: Final = 12
BETWEEN: Final = 10
STEPS: Final = 240
LEAVES: Final = "m1"
SETTINGS: Final = (
    ("controller.resend_interval_s", "3"),
    ("controller.return_to_pool", "false"),
)
"""With sixteen machines on a few cores answers take long: asking again would only add to it, and
so would a machine that builds itself anew beside the second move."""
COUNTS: Final = ("messages_sent", "messages_received", "connections_opened", "state_bytes")
KINDS: Final = ("planned", "unplanned")
TINY: Final = (
    *("--layers", "1", "--width", "32", "--heads", "2", "--sequence", "32"),
    *("--batch", "1", "--workers", "0"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig:
    """Size of the benchmark."""

    folder: Path
    machines: tuple[int, ...] = (2, 4, 8, 16)
    repetitions: int = 3
    model: tuple[str, ...] = TINY
    limit_s: float = 900.0


def measure(config: ScaleConfig, tell: Callable[[str], None]) -> Samples:
    """One job per number of machines and repetition. Raises ConfigError outside a clone."""
    runs = []
    for machines in config.machines:
        for index in range(config.repetitions):
            tell(f"{machines} machines, {index + 1} of {config.repetitions}")
            folder = config.folder / f"scale-{machines}-{index}"
            runs.append({"machines": machines} | _run(config, machines, folder))
    return {"runs": runs, "model": list(config.model)}


def _run(config: ScaleConfig, machines: int, folder: Path) -> dict[str, Any]:
    shape = JobShape(
        machines=machines,
        standbys=2,
        steps=STEPS,
        model=config.model,
        settings=SETTINGS,
        limit_s=config.limit_s,
    )
    plain = held_job.request_of(shape)
    reference = run_undisturbed(plain, folder.with_name(f"undisturbed-{folder.name}"))
    request = replace(plain, disturbance=(held_job.held(HOLD_AT, folder),))
    with RunningJob(request, folder) as job:
        job.wait_for_step(HOLD_AT - 1, held_job.WAIT_S)
        job.wait_for_standby(2, held_job.WAIT_S)
        held_job.let_go(job)
        job.wait_for_step(HOLD_AT + BETWEEN)
        spare = f"m{machines}"
        planned_cpu = _during(job, lambda: job.switchover((LEAVES,), (spare,)), 1)
        job.wait_for_step(job.last_step() + BETWEEN)
        # The joiner of the first move dies: the same stayers, whatever the number of machines.
        unplanned_cpu = _during(job, lambda: job.kill_machine(spare), 2)
        result = held_job.end(job, f"{machines} machines")
        events = read_events(folder)
        samples = [held_job.incident_sample(i, events, job) for i in result.incidents]
    return {
        "planned": samples[0] | {"cpu": planned_cpu},
        "unplanned": samples[1] | {"cpu": unplanned_cpu},
        "step_s": median_step_s(events, HOLD_AT + 2),
        "is_identical": compare(result, reference).is_identical,
    }


def _during(job: RunningJob, act: Callable[[], object], count: int) -> list[dict[str, Any]]:
    """Core time of the workers that live through what `act` causes, until its report."""
    before = {pid: core_share.read(pid) for pid in _worker_pids(job)}
    act()
    job.wait_for_incidents(count, held_job.WAIT_S)
    found = []
    for pid in _worker_pids(job):
        now, then = core_share.read(pid), before.get(pid)
        if now is not None and then is not None:
            spent = now - then
            found.append({"ran_s": spent.ran_s, "waited_s": spent.waited_s})
    return found


def _worker_pids(job: RunningJob) -> list[int]:
    found = []
    for member in job.members():
        try:
            found.append(job.worker(member.rank)[0])
        except TrainMoverError:
            continue  # it is being replaced: it does not live through this
    return found


# ---------------------------------------------------------------------------------------- summary


def counts_of(sample: dict[str, Any]) -> dict[str, int]:
    """Of the stayer that had most of each, and bytes that the joiner's source had to send."""
    stayers = [role for role in sample["roles"] if not role["is_joiner"]]
    traffic = [role["traffic"] for role in stayers if role["traffic"] is not None]
    return {
        "messages_sent": _most(each["messages_sent"] for each in traffic),
        "messages_received": _most(each["messages_received"] for each in traffic),
        "connections_opened": _most(role["opened"] for role in stayers),
        "state_bytes": _most(r["bytes_received"] for r in sample["roles"] if r["is_joiner"]),
    }


def growing_of(sample: dict[str, Any]) -> dict[str, int]:
    """What may grow with the number of machines, per stayer."""
    stayers = [role for role in sample["roles"] if not role["is_joiner"]]
    traffic = [role["traffic"] for role in stayers if role["traffic"] is not None]
    return {
        "channels": _most(role["inherited"] + role["opened"] for role in stayers),
        "frames_sent": _most(each["frames_sent"] for each in traffic),
        "channel_bytes_sent": _most(each["bytes_sent"] for each in traffic),
        "messages_repeated": _most(each["messages_repeated"] for each in traffic),
    }


def _most(values: Iterable[int]) -> int:
    return max(values, default=-1)


def failures(samples: Samples) -> list[str]:
    """Counts that differ between numbers of machines, or that no stayer has told."""
    wrong = []
    for kind in KINDS:
        for name in COUNTS:
            by_machines = _by_machines(samples, kind, name)
            values = {value for found in by_machines.values() for value in found}
            if len(values) != 1 or min(values) < 0:
                told = ", ".join(f"{n} machines {sorted(v)}" for n, v in by_machines.items())
                wrong.append(f"{kind}: {name} of a stayer is not one number: {told}")
    return wrong


def _by_machines(samples: Samples, kind: str, name: str) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for run in samples["runs"]:
        found.setdefault(run["machines"], set()).add(counts_of(run[kind])[name])
    return found


def summarise(samples: Samples) -> Summary:
    """Downtime by machines, whether counts are equal, CPU per worker and share of waiting."""
    summary: Summary = {"counts_equal": not failures(samples)}
    summary["identical"] = all(run["is_identical"] for run in samples["runs"])
    for machines in sorted({run["machines"] for run in samples["runs"]}):
        runs = [run for run in samples["runs"] if run["machines"] == machines]
        for kind in KINDS:
            downtimes = [run[kind]["downtime_s"] for run in runs]
            summary[f"{kind}_s_by_machines_{machines}"] = statistics.median(downtimes)
            spent = [each for run in runs for each in run[kind]["cpu"]]
            if spent:
                cpu_s = statistics.median(each["ran_s"] for each in spent)
                summary[f"{kind}_cpu_s_per_worker_{machines}"] = cpu_s
                summary[f"{kind}_waiting_share_{machines}"] = waiting_share(spent)
    return summary


def waiting_share(spent: Sequence[dict[str, float]]) -> float:
    """Share of the time in which workers wanted a core and had none."""
    waited_s = sum(each["waited_s"] for each in spent)
    wanted_s = waited_s + sum(each["ran_s"] for each in spent)
    return waited_s / wanted_s if wanted_s > 0 else 0.0


def table_rows(samples: Samples) -> list[list[str]]:
    """A column per kind and number of machines: what is judged, then what may grow."""
    heads, columns = ["per stayer, at most"], []
    for kind in KINDS:
        for machines in sorted({run["machines"] for run in samples["runs"]}):
            found = [run[kind] for run in samples["runs"] if run["machines"] == machines]
            columns.append([counts_of(sample) | growing_of(sample) for sample in found])
            heads.append(f"{kind}\n{machines}")
    names = columns[0][0] if columns else {}
    lines = [
        [name.replace("_", " "), *(_range(each[name] for each in found) for found in columns)]
        for name in names
    ]
    return [heads, *lines]


def _range(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


BENCHMARK: Final = bench_file.Benchmark(
    name="scale",
    summarise=summarise,
    targets={"counts_equal": "yes", "identical": "yes"},
    failures=failures,
    table_rows=table_rows,
)
