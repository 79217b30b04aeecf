"""`bench scale`: does a switchover cost a stayer more when the job, or the move, has more machines?

Decides what is counted on a stayer's critical path, from its stop to the commit: messages to and
from the controller, connections opened, bytes of state moved. These must be equal from the fewest
machines to the most, else the command exits with 1. What does grow is told beside them and not
judged: frames on kept channels (one per channel: log2 of the ranks), personal state for the two
backups (one, where there is only one other machine), and wall time on a host with too few cores.

With `--at-once 1,3` it is the number of machines that go at the same time which varies: each run is
one planned switchover of so many and one loss of so many, each of which must be one incident in one
round. All runs have as many processes.
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
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import JobShape
from trainmover.drills.report import joiners
from trainmover.drills.step_times import median_step_s
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.errors import ConfigError, DrillFailed, TrainMoverError
from trainmover.protocol.journal import IncidentReport

HOLD_AT: Final = 12
BETWEEN: Final = 10
STEPS: Final = 240
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
    at_once: tuple[int, ...] = ()
    """Machines that go at the same time; none: one, and stayers' counts are compared instead."""
    repetitions: int = 3
    model: tuple[str, ...] = TINY
    limit_s: float = 900.0


def measure(config: ScaleConfig, tell: Callable[[str], None]) -> Samples:
    """One job per number of machines and repetition. Raises ConfigError outside a clone."""
    found: dict[str, list[dict[str, Any]]] = {"runs": [], "at_once": []}
    standbys = 2 * max(config.at_once, default=1)
    for machines in config.machines:
        if any(not 0 < count < machines for count in config.at_once):
            raise ConfigError(f"--at-once: expected 1 to {machines - 1} of {machines} machines")
        for index in range(config.repetitions):
            for count in config.at_once or (1,):
                kept = found["at_once" if config.at_once else "runs"]
                tell(f"{count} of {machines} machines, {index + 1} of {config.repetitions}")
                folder = config.folder / f"scale-{count}-of-{machines}-{index}"
                one = _run(config, _Going(machines, count, standbys), folder)
                kept.append({"machines": machines, "count": count} | one)
    return {**found, "model": list(config.model)}


@dataclass(frozen=True, slots=True)
class _Going:
    """How many of how many go at the same time."""

    machines: int
    count: int
    standbys: int

    @property
    def leaving(self) -> tuple[str, ...]:
        """Far from each other: a rank's personal state is held by the next two."""
        stride = self.machines // self.count
        return tuple(f"m{(1 + index * stride) % self.machines}" for index in range(self.count))

    @property
    def spares(self) -> tuple[str, ...]:
        """The standbys that take their place."""
        return tuple(f"m{self.machines + index}" for index in range(self.count))


def _run(config: ScaleConfig, going: _Going, folder: Path) -> dict[str, Any]:
    shape = JobShape(
        machines=going.machines,
        standbys=going.standbys,
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
        held_job.wait_until_ready(job, going.standbys)
        held_job.let_go(job)
        job.wait_for_step(HOLD_AT + BETWEEN)
        planned_cpu = _during(job, lambda: job.switchover(going.leaving, going.spares), 1)
        job.wait_for_step(job.last_step() + BETWEEN)
        # The joiners of the first move die: the same stayers, whatever the number of machines.
        unplanned_cpu = _during(job, lambda: job.kill_machine(*going.spares), 2)
        result = held_job.end(job, f"{going.count} of {going.machines} machines")
        events = read_events(folder)
        _check_rounds(result.incidents, going)
        samples = [held_job.incident_sample(i, events, job) for i in result.incidents]
    return {
        "planned": samples[0] | {"cpu": planned_cpu},
        "unplanned": samples[1] | {"cpu": unplanned_cpu},
        "step_s": median_step_s(events, HOLD_AT + 2),
        "is_identical": compare(result, reference).is_identical,
    }


def _check_rounds(incidents: Sequence[IncidentReport], going: _Going) -> None:
    """Each is one incident in which all went in one round. Raises DrillFailed."""
    told = [(each.kind, each.number - each.base_generation) for each in incidents]
    joined = [len(joiners(each)) for each in incidents]
    if told != [("planned", 1), ("standby", 1)] or joined != [going.count] * 2:
        raise DrillFailed(
            f"{going.count} of {going.machines} at once: expected a planned switchover and a loss, "
            f"each in one round, got {told} with {joined} joiners"
        )


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
    for kind in KINDS if samples["runs"] else ():
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
    summary: Summary = {}
    if samples["runs"]:
        summary["counts_equal"] = not failures(samples)
    at_once = samples.get("at_once", [])
    summary["identical"] = all(run["is_identical"] for run in [*samples["runs"], *at_once])
    summary |= _at_once(at_once)
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


def _at_once(runs: Sequence[dict[str, Any]]) -> Summary:
    """Downtime by how many went at the same time; most against fewest of them."""
    summary: Summary = {}
    for machines in sorted({run["machines"] for run in runs}):
        here = [run for run in runs if run["machines"] == machines]
        counts = sorted({run["count"] for run in here})
        for kind in KINDS:
            medians = [
                statistics.median(run[kind]["downtime_s"] for run in here if run["count"] == count)
                for count in counts
            ]
            for count, median in zip(counts, medians, strict=True):
                summary[f"{kind}_s_{count}_of_{machines}"] = median
            if len(counts) > 1:
                ratio = medians[-1] / max(medians[0], 1e-4)
                summary[f"{kind}_ratio_{counts[-1]}_to_{counts[0]}_of_{machines}"] = ratio
    return summary


def waiting_share(spent: Sequence[dict[str, float]]) -> float:
    """Share of the time in which workers wanted a core and had none."""
    waited_s = sum(each["waited_s"] for each in spent)
    wanted_s = waited_s + sum(each["ran_s"] for each in spent)
    return waited_s / wanted_s if wanted_s > 0 else 0.0


def table_rows(samples: Samples) -> list[list[str]]:
    """A column per kind and number of machines: what is judged, then what may grow."""
    heads, columns = ["per stayer, at most"], []
    if not samples["runs"]:
        return []
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
    targets={
        "counts_equal": "yes",
        "identical": "yes",
        **{f"{kind}_ratio_3_to_1_of_9": "at most 1.5" for kind in KINDS},
    },
    failures=failures,
    table_rows=table_rows,
)
