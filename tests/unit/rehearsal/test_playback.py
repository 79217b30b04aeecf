"""Which recorded call a call is: by order in its group, kind, shape and dtype."""

from __future__ import annotations

from tests.unit.rehearsal.shapes import message, reduce, stage

from trainmover.rehearsal.calls import CallShape
from trainmover.rehearsal.recording import Entry
from trainmover.rehearsal.sandbox import NOTHING, _Playback


def playback(*shapes: CallShape, is_exact: bool = True) -> _Playback:
    entries = [Entry(shape, f"train.py:{index}") for index, shape in enumerate(shapes)]
    return _Playback(entries, is_exact=is_exact)


def places(play: _Playback, *shapes: CallShape) -> list[str | None]:
    taken = [play.take(shape) for shape in shapes]
    return [None if entry is None else entry.place for entry in taken]


def test_calls_come_in_order() -> None:
    play = playback(reduce(4), reduce(8), reduce(4))
    assert places(play, reduce(4), reduce(8), reduce(4)) == [f"train.py:{i}" for i in range(3)]
    assert places(play, reduce(4)) == [None]
    assert play.expected(reduce(4)) == NOTHING


def test_another_call_is_refused_and_the_expected_one_named() -> None:
    play = playback(reduce(4), reduce(8))
    assert places(play, reduce(5)) == [None]
    assert play.expected(reduce(5)) == "all_reduce SUM of [4] float32 among 4 (train.py:0)"


def test_groups_have_orders_of_their_own() -> None:
    play = playback(reduce(4), reduce(8, group=1))
    assert places(play, reduce(8, group=1), reduce(4)) == ["train.py:1", "train.py:0"]


def test_stages_in_the_middle_share_a_recording_whatever_their_warm_up() -> None:
    play = playback(*stage(1, 5, rows=4))
    other = stage(3, 5, rows=4)
    assert other != stage(1, 5, rows=4)
    assert None not in places(play, *other)
    assert places(play, message("recv", "prev")) == [None]


def test_iterations_behind_the_recorded_ones_may_lack_what_only_a_first_one_does() -> None:
    order = CallShape("broadcast", "", 0, 4, ((5,),), ("torch.int32",))
    play = playback(order, reduce(4), reduce(8), is_exact=False)
    assert places(play, reduce(4), reduce(8)) == ["train.py:1", "train.py:2"]
    assert places(play, reduce(9)) == [None]
