"""Backups of personal state: nothing is lost while it may be needed, nothing is kept for ever."""

from __future__ import annotations

import pytest

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.messages import Version
from trainmover.worker.personal import KEPT_VERSIONS, BackupStore, Personal, decode, encode


def personal(step: int, owner: int = 3, *, is_final: bool = True, rng: bytes = b"r") -> Personal:
    return Personal(
        owner_rank=owner,
        version=Version(step=step, lineage=1),
        is_final=is_final,
        rng=rng,
        batches=(b"b",),
        smalls=(("scheduler", b"s"),),
        step_index=step,
    )


def test_it_travels_unchanged() -> None:
    sent = personal(7)
    assert decode(encode(sent)) == sent


def test_what_is_not_personal_state_is_named() -> None:
    with pytest.raises(RemoteProtocolError, match="expected personal state, got 3 bytes"):
        decode(b"abc")


def test_the_store_stays_bounded_over_a_long_job() -> None:
    store = BackupStore()
    for step in range(10_000):
        for owner in (2, 3):
            store.put(encode(personal(step, owner)))
    held = store.held()
    assert len(held) == 2 * KEPT_VERSIONS
    assert {each.version.step for each in held} == set(range(10_000 - KEPT_VERSIONS, 10_000))


def test_versions_that_a_plan_may_choose_are_kept() -> None:
    """The owner may be one gate ahead, and the plan may go one back (protocol.md, finding 5)."""
    store = BackupStore()
    for step in range(5):
        store.put(encode(personal(step)))
    newest = 4
    for step in (newest - 2, newest - 1, newest):
        assert store.get(3, step) == personal(step)


def test_a_gate_copy_never_replaces_a_final_one() -> None:
    store = BackupStore()
    store.put(encode(personal(5, rng=b"final")))
    held = store.put(encode(personal(5, is_final=False, rng=b"gate")))
    kept = store.get(3, 5)
    assert held.is_final
    assert kept is not None
    assert kept.rng == b"final"


def test_a_final_copy_replaces_a_gate_copy() -> None:
    store = BackupStore()
    store.put(encode(personal(5, is_final=False, rng=b"gate")))
    assert store.put(encode(personal(5, rng=b"final"))).is_final
    kept = store.get(3, 5)
    assert kept is not None
    assert kept.rng == b"final"


def test_versions_of_undone_attempts_are_forgotten() -> None:
    store = BackupStore()
    for step in (4, 5, 6):
        store.put(encode(personal(step)))
    store.drop_above(5)
    assert [each.version.step for each in store.held()] == [4, 5]
