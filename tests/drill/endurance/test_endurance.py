"""One job through switchover after switchover: nothing leaks, nothing slows down (A22).

Ranks 1 and 2 move back and forth between four machines; rank 0 stays, so its process lives through
all of it. The short form compares counts exactly; only the long one looks at memory and time.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from tests import tiny
from tests.drill.endurance.watch import Holdings, Trend, holdings, long_lived, trend
from tests.waiting import eventually

from trainmover.drills.harness import RunningJob
from trainmover.drills.report import phase_rows
from trainmover.drills.request import JobRequest

MACHINES = 3
STANDBYS = 2
ALL = tuple(f"m{index}" for index in range(MACHINES + STANDBYS))
SNAPSHOTS_MAX = 12
"""Own ones under way and complete, and those of two wards, of an older step and a newer."""
POLL_S = 0.1
"""A status carries the last hundred reports: asking for it all the time would be the load."""
FIRST_LOOKS = 3
WARM_UP = 2
"""Switchovers until lazy imports, pools and caches of all processes are there."""
FILLED = 400
"""Switchovers until what is kept of the last ones is full: 100 reports and replies and 500 console
lines in the controller, 32 ended workers and 64 messages in each agent, of which each has a fifth
of the moves or more."""


def request(limit_s: float) -> JobRequest:
    """A job that is stopped, not run to its end."""
    return JobRequest(
        script=tiny.SCRIPT,
        arguments=("--steps", "1000000"),
        machines=MACHINES,
        standbys=STANDBYS,
        limit_s=limit_s,
    )


def ready(job: RunningJob) -> list[str]:
    """Standbys' machines, once all are ready; else empty."""
    found = job.ready_standbys()
    return found if len(found) == STANDBYS else []


class Endurance:
    """Moves one rank after another and notes what the long-lived processes hold."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self.draw = random.Random(tiny.seed())
        self.pids: dict[str, int] = {}
        self.first: dict[str, tuple[int, ...]] = {}
        self.series: dict[str, list[Holdings]] = {}
        self.last_moved = 1

    def move(self, index: int) -> None:
        """One switchover: mostly there and back, at times another rank."""
        if index % 5 == 4:
            self.last_moved = self.draw.choice((1, 2))
        standbys = eventually(
            lambda: ready(self.job), "all standbys ready", timeout_s=60.0, poll_s=POLL_S
        )
        machine = self.job.member(self.last_moved).machine
        self.job.switchover((machine,), (self.draw.choice(standbys),))
        eventually(lambda: ready(self.job), f"{machine} returns", timeout_s=60.0, poll_s=POLL_S)

    def note(self) -> None:
        """Hold each process against its first counts; a leak never comes back to them."""
        if not self.pids:
            self.pids = long_lived(self.job, ALL)
            self.first = {name: holdings(pid).counts for name, pid in self.pids.items()}
        for name, pid in self.pids.items():
            eventually(
                lambda pid=pid, name=name: self.is_back(name, holdings(pid).counts),
                f"{name} holds {self.first[name]} descriptors, threads, connections at most",
                timeout_s=30.0,
                poll_s=POLL_S,
            )
            held = holdings(pid)
            assert held.snapshots <= SNAPSHOTS_MAX, f"{name} holds {held.snapshots} snapshots"
            self.series.setdefault(name, []).append(held)

    def is_back(self, name: str, now: tuple[int, int, int]) -> bool:
        """No count is higher than at the first looks, which may find something just closed."""
        if len(self.series.get(name, ())) < FIRST_LOOKS:
            self.first[name] = tuple(map(max, now, self.first[name]))
        return all(here <= before for here, before in zip(now, self.first[name], strict=True))

    def run(self, count: int) -> None:
        """`count` switchovers, noted from the end of the warm-up."""
        for index in range(count):
            self.move(index)
            if index + 1 >= WARM_UP:
                self.note()


def end(job: RunningJob, count: int) -> list[float]:
    """Stop the job; seconds that each switchover kept rank 0 from training."""
    job.signal(signal.SIGINT)
    result = job.wait_until_done(60.0)
    job.assert_no_leftovers()
    assert result.outcome is not None
    assert result.outcome.code == result.code, result.output
    assert [incident.kind for incident in result.incidents] == ["planned"] * count
    assert result.repeated == ()
    assert sorted(result.losses) == list(range(len(result.losses)))
    return [phase_rows(incident)[-1].stayer_s or 0.0 for incident in result.incidents]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_switchovers_leave_no_count_higher(tmp_path: Path) -> None:
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    with RunningJob(request(560.0), tmp_path / "job") as job:
        endurance = Endurance(job)
        endurance.run(20)
        end(job, 20)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_switchovers_are_flat(tmp_path: Path) -> None:
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    with RunningJob(request(3500.0), tmp_path / "job") as job:
        endurance = Endurance(job)
        endurance.run(FILLED + 200)
        seconds = end(job, FILLED + 200)
    trends = [trend("seconds per switchover", seconds[FILLED:])]
    trends += memory_trends(endurance)
    for each in trends:
        print(each.sentence())
    print(json.dumps({"seconds": seconds}))
    assert all(each.is_flat for each in trends), [t.sentence() for t in trends if not t.is_flat]


def memory_trends(endurance: Endurance) -> list[Trend]:
    """Resident memory over the last 200. The number of snapshots has a bound instead: which machine
    holds how many changes with where the ranks are."""
    found = []
    for name, series in endurance.series.items():
        last = series[-200:]
        found.append(trend(f"{name}, MiB", [held.resident_bytes / 2**20 for held in last]))
    return found


def test_a_leak_is_no_flat_series_and_noise_is() -> None:
    draw = random.Random(5)
    noise = [100 + draw.gauss(0, 1) for _ in range(200)]
    assert trend("noise", noise).is_flat
    assert trend("constant", [7.0] * 200).is_flat
    leaking = [value + 0.05 * index for index, value in enumerate(noise)]
    assert not trend("leak", leaking).is_flat
    assert not trend("one descriptor in ten", [50 + index // 10 for index in range(200)]).is_flat
