"""When rank 0 asks for a snapshot, and when for a durable one."""

from __future__ import annotations

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
