"""Figures of a torchrun baseline from its event lines; bad requests are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmover.drills.baseline import (
    BaselineConfig,
    Event,
    finished_by_all,
    read_events,
    reported,
    samples,
)
from trainmover.errors import BaselineFailed, ConfigError

FAULT_S = 14.5


@pytest.fixture
def config(tmp_path: Path) -> BaselineConfig:
    script = tmp_path / "script.py"
    script.write_text("")
    return BaselineConfig(script=script, folder=tmp_path, ranks=2, fault_rank=1, fault_step=4)


def step(rank: int, pid: int, number: int, time_s: float) -> Event:
    return Event(
        name="step", rank=rank, pid=pid, agent=1, time_s=time_s, step=number, loss=f"0x{number}p+0"
    )


def life(pids: tuple[int, int], steps: dict[int, float]) -> list[Event]:
    """Both ranks finish each step; rank 1 a tenth of a second after rank 0."""
    return [
        step(rank, pids[rank], number, time_s + rank / 10)
        for number, time_s in steps.items()
        for rank in (0, 1)
    ]


def test_figures_of_a_restart(config: BaselineConfig) -> None:
    # Steps of one second from 10.0 on; 0 is slow because it connects. Restarted from step 3.
    before = life((100, 101), {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0})
    started = [
        Event(name="started", rank=r, pid=200 + r, agent=1, time_s=20.0 + r, step=-1, loss="")
        for r in (0, 1)
    ]
    after = life((200, 201), {3: 30.0, 4: 31.0, 5: 32.0})
    found = samples(config, "unplanned", [*before, *started, *after], FAULT_S)
    assert found["step_s"] == pytest.approx(1.0)
    assert found["downtime_s"] == pytest.approx(30.1 - 14.1 - 1.0)
    assert found["to_new_s"] == pytest.approx(32.1 - 14.1 - 1.0)
    assert found["redone"] == 2
    assert found["phases_s"]["started"] == pytest.approx(21.0 - FAULT_S)
    assert found["losses"]["5"] == "0x5p+0"


def test_a_step_counts_once_every_rank_has_finished_it() -> None:
    events = [*life((1, 2), {0: 1.0, 1: 2.0}), step(0, 1, 2, 3.0)]
    assert finished_by_all(events, 2) == {0: 1.1, 1: 2.1}


def test_survivors_that_finish_the_step_of_the_fault_count_as_before(
    config: BaselineConfig,
) -> None:
    before = life((100, 101), {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0})
    late = [step(1, 101, 4, 14.0), step(0, 100, 4, FAULT_S + 0.01)]
    found = samples(config, "x", [*before, *late, *life((200, 201), {4: 30.0, 5: 31.0})], FAULT_S)
    assert found["redone"] == 1


def test_a_job_that_never_came_back_has_no_figures(config: BaselineConfig) -> None:
    before = life((100, 101), {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0})
    with pytest.raises(BaselineFailed, match="after the fault"):
        samples(config, "x", before, FAULT_S)


def test_half_written_lines_wait(config: BaselineConfig) -> None:
    line = {"event": "step", "rank": 1, "pid": 7, "agent": 3, "time_s": 1.5, "step": 4, "loss": "0"}
    folder = config.folder / "events"
    folder.mkdir()
    (folder / "7.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line)[:20])
    events = read_events(config.folder)
    assert [event.time_s for event in events] == [1.5]
    assert reported(events, config) == events[0]
    assert reported([step(0, 1, 4, 1.0), step(1, 7, 3, 1.0)], config) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fault_rank": 4}, "not one of 4 ranks"),
        ({"fault_rank": 0}, "hosts the rendezvous"),
        ({"steps": 27}, "before a fault at 26"),
        ({"script": Path("nowhere.py")}, "nowhere.py is not there"),
    ],
)
def test_bad_requests_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    values: dict[str, object] = {"script": script, "folder": tmp_path} | change
    with pytest.raises(ConfigError, match=words):
        BaselineConfig(**values)  # type: ignore[arg-type]
