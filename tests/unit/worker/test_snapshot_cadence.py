"""When rank 0 asks for a snapshot, and when for a durable one."""

from __future__ import annotations

from trainmover.protocol.messages import CostsMeasured, SnapshotTaken, Version
from trainmover.topology.keeping import CheckpointConfig, Keeping, SnapshotConfig
from trainmover.worker.snapshot_cadence import DURABLE, MEMORY, NONE, SnapshotCadence


def cadence(memory: str = "every 10 steps", durable: str = "", place: str = "") -> SnapshotCadence:
    keeping = Keeping(
        snapshot=SnapshotConfig(cadence=memory),
        checkpoint=CheckpointConfig(directory=place, cadence=durable),
    )
    return SnapshotCadence(keeping, 2, 0.0)


def test_steps_are_counted_from_the_last_one_asked_for() -> None:
    it = cadence()
    assert [it.level(step, 0.0) for step in (1, 9, 10, 11)] == [NONE, NONE, MEMORY, MEMORY]
    it.asked(10, MEMORY, 0.0)
    assert [it.level(step, 0.0) for step in (11, 19, 20)] == [NONE, NONE, MEMORY]


def test_state_that_was_loaded_counts_as_kept() -> None:
    it = cadence()
    it.begin(37, 0.0)
    assert it.level(39, 0.0) == NONE
    assert it.level(40, 0.0) == MEMORY


def test_durable_ones_have_a_clock_of_their_own() -> None:
    it = cadence(durable="every 20 steps", place="/somewhere")
    it.asked(10, MEMORY, 0.0)
    assert it.level(20, 0.0) == DURABLE
    it.asked(20, DURABLE, 0.0)
    assert it.level(30, 0.0) == MEMORY
    assert it.level(40, 0.0) == DURABLE


def test_without_a_place_nothing_is_durable() -> None:
    it = cadence(durable="every 5 steps")
    assert it.level(9, 0.0) == NONE


def test_a_small_job_has_a_checkpoint_every_few_minutes_by_itself() -> None:
    it = cadence(memory="never", place="/somewhere")
    assert it.level(500, 200.0) == NONE
    assert it.level(500, 301.0) == DURABLE


def costs(save_s: float, failures: int, elapsed_s: float) -> CostsMeasured:
    return CostsMeasured(term=1, save_s=save_s, failures=failures, elapsed_s=elapsed_s)


def taken(blocked_s: float) -> SnapshotTaken:
    return SnapshotTaken(
        incarnation="w",
        rank=0,
        version=Version(step=1, lineage=1),
        generation=1,
        identity="i",
        path="",
        size_bytes=1_000_000,
        bulk_digest=0,
        blocked_s=blocked_s,
        level=2,
    )


def interval(it: SnapshotCadence, now_s: float) -> float:
    news = it.news("w", now_s)
    assert news is not None
    return news.checkpoint_interval_s


def test_adaptive_goes_by_the_measured_cost_and_the_failures_of_this_job() -> None:
    it = cadence(durable="adaptive", place="/somewhere")
    assert interval(it, 1.0) == 60.0, "the first one early, to be measured"
    it.taken(taken(2.0))
    it.learn(costs(5.0, 0, 3600.0), 3600.0)
    calm = interval(it, 3600.0)
    it.learn(costs(5.0, 30, 7200.0), 7200.0)
    restless = interval(it, 7200.0)
    assert 60.0 < restless < calm / 3
    it.learn(costs(500.0, 30, 7200.0), 7200.0)
    assert interval(it, 7200.0) == 500.0, "saves never overlap"
    assert it.news("w", 7200.0) is None, "no news"


def test_what_it_costs_is_told_with_it() -> None:
    it = cadence(durable="every 2 min", place="/somewhere")
    it.taken(taken(1.2))
    it.learn(costs(6.0, 1, 3600.0), 10.0)
    news = it.news("w", 20.0)
    assert news is not None
    assert news.blocked_share == 0.01
    assert news.terabytes_per_hour == 30 * 2e6 / 1e12
    assert news.age_s == 126.0
    assert "a checkpoint takes 6.0 s" in news.reason and "1 failures in 1.0 h" in news.reason


def test_an_unstable_loss_makes_it_denser() -> None:
    it = cadence(memory="never", durable="every 1 min until step 10, then every 1 h", place="/s")
    assert it.level(50, 120.0) == NONE
    it.loss_is_unstable = True
    assert it.level(50, 120.0) == DURABLE


def test_steps_become_seconds_by_their_median() -> None:
    it = cadence(memory="every 20 steps")
    for step in range(1, 8):
        it.level(step, 2.0 * step)
    news = it.news("w", 20.0)
    assert news is not None and news.snapshot_interval_s == 40.0
    assert news.checkpoint_interval_s == -1.0
