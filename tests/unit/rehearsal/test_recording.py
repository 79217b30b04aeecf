"""A recording's file: whole or not there, checked on use, never bigger than one iteration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.rehearsal.shapes import message, reduce

from trainmover.errors import RecordingError
from trainmover.rehearsal.calls import CallShape
from trainmover.rehearsal.recorder import Recorder, _Iteration
from trainmover.rehearsal.recording import Draft, Entry, Header, Recording, RecordingStore
from trainmover.rehearsal.sandbox import open_recording

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def header(*iterations: list[CallShape]) -> Header:
    return Header(
        fingerprint="f",
        role_class="c",
        state="s",
        ranks=(0, 2),
        torch="2",
        iterations=tuple(
            tuple(Entry(shape, "train.py:3") for shape in shapes) for shapes in iterations
        ),
    )


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES] + [torch.empty(0)]
    path = tmp_path / "f" / "c.recording"
    size = Draft(header([reduce(6), message("send", "next")]), [[values, None]]).write(path)
    assert size == sum(value.nbytes for value in values)
    recording = open_recording(path, "f", "c")
    sent, silent = recording.header.iterations[0]
    for value, kept in zip(values, recording.tensors(sent), strict=True):
        assert kept.dtype == value.dtype
        assert torch.equal(kept, value)
    assert silent.values is None
    recording.close()
    assert [name.name for name in path.parent.iterdir()] == ["c.recording"]


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c.recording"
    Draft(header([reduce(3)]), [[[torch.ones(3)]]]).write(path)
    good = path.read_bytes()
    found = 0
    for place in range(0, len(good), 7):
        broken = bytearray(good)
        broken[place] ^= 4
        path.write_bytes(bytes(broken))
        message = refusal(path)
        assert message is None or str(path) in message
        found += message is not None
    assert found > len(good) // 7 - 64 // 7 - 2, "only a flip in the padding may pass"


def refusal(path: Path) -> str | None:
    """Why the file is refused; None: its value was read, and is right."""
    try:
        recording = Recording(path)
        kept = recording.tensors(recording.header.iterations[0][0])
    except RecordingError as error:
        return str(error)
    assert torch.equal(kept[0], torch.ones(3))
    return None


def test_another_script_s_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.recording"
    Draft(header([reduce(3)]), [[None]]).write(path)
    with pytest.raises(RecordingError, match="fingerprint other"):
        open_recording(path, "other", "c")
    with pytest.raises(RecordingError, match="class d"):
        open_recording(path, "f", "d")


def test_a_rank_finds_its_class_by_the_shapes_of_its_state(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path, "f")
    assert store.of_rank(0, "s") is None
    Draft(header([reduce(3)]), [[None]]).write(store.path("c"))
    found = store.of_rank(2, "s")
    assert found is not None
    assert found.header.role_class == "c"
    assert store.of_rank(1, "s") is None, "another rank's class"
    assert store.of_rank(0, "other shapes") is None
    store.path("c").write_bytes(b"damaged")
    assert store.of_rank(0, "s") is None


def recorder(*iterations: list[tuple[CallShape, int]]) -> Recorder:
    made = Recorder(None, 1, 1 << 30, lambda: "train.py:1")  # type: ignore[arg-type]
    made._iterations = [
        _Iteration(
            [Entry(shape, "train.py:1") for shape, _ in calls],
            [[torch.zeros(numel)] if numel else None for _, numel in calls],
        )
        for calls in iterations
    ]
    return made


def test_two_iterations_keep_no_more_than_the_larger_one() -> None:
    first = [(reduce(60), 60)]
    order = (CallShape("broadcast", "", 0, 4, ((5,),), ("torch.int32",)), 5)
    second = [order, (reduce(40), 40), (reduce(20), 20)]
    made = recorder(first, second)
    made.settle()
    assert made.bytes == 4 * 65
    assert made._iterations[0].kept == [None], "its single bucket: loop-back is as good"
    assert all(kept is not None for kept in made._iterations[1].kept)


def test_what_both_iterations_have_is_kept_once() -> None:
    made = recorder([(reduce(8), 8), (reduce(8), 8)], [(reduce(8), 8), (reduce(8), 8)])
    made.settle()
    assert made.bytes == 4 * 16


def test_one_iteration_is_kept_whole() -> None:
    made = recorder([(reduce(8), 8), (message("recv", "prev"), 8), (message("send", "next"), 0)])
    made.settle()
    assert made.bytes == 4 * 16
