"""What peers that wait are told: inside a step, at the gate, or rightly elsewhere."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from trainmover.communicator.settings import Place
from trainmover.protocol.messages import Held, Version
from trainmover.topology import Membership
from trainmover.units import Instant
from trainmover.worker.lifecycle import LifecycleConfig, initial_state
from trainmover.worker.lifecycle_state import (
    Bound,
    Building,
    InGate,
    Main,
    Ready,
    Running,
    Tail,
    WorkerState,
)
from trainmover.worker.whereabouts import awaited_wards, place_of

from .stories import ME, members

NOW = Instant(1)
READY = Ready(3, 0, (), NOW)


def state(main: Main, **changes: object) -> WorkerState:
    start = initial_state(LifecycleConfig(), ME, now=NOW)
    return replace(start, main=main, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("main", "place"),
    [
        (Building(NOW), Place.BUILDING),
        (Running(3, NOW), Place.INSIDE),
        (READY, Place.AT_GATE),
        (InGate(3, 0, NOW), Place.AT_GATE),
        (Tail(3, NOW), Place.OUTSIDE),
        (Bound(4), Place.OUTSIDE),
    ],
)
def test_place_of_the_main_thread(main: Main, place: Place) -> None:
    assert place_of(state(main, step_time_ns=5)) is place


def test_a_process_in_its_first_step_may_compile() -> None:
    assert place_of(state(Running(3, NOW))) is Place.OUTSIDE


def test_a_ready_rank_waits_for_its_wards() -> None:
    membership = Membership(generation=2, members=members(ME, "m1.0.b"))
    ready = state(READY, membership=membership, generation=2, rank=0)
    assert awaited_wards(ready) == (1,)
    held = Held(owner_rank=1, version=Version(step=4, lineage=2), is_final=True)
    assert awaited_wards(replace(ready, personal=(held,))) == ()
    assert awaited_wards(replace(ready, main=Tail(3, NOW))) == ()
