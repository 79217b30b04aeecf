"""The page: what is written is read, texts are cut, a writer stopped half-way is recognised."""

from __future__ import annotations

import pytest

from trainmover.protocol.progress_page import PAGE_BYTES, RUNNING, ProgressPage


def page() -> tuple[ProgressPage, bytearray]:
    buffer = bytearray(PAGE_BYTES)
    made = ProgressPage(buffer)
    made.initialise()
    return made, buffer


def test_the_empty_page_says_nothing_has_happened() -> None:
    progress = page()[0].read()
    assert (progress.step, progress.gate, progress.generation, progress.is_torn) == (
        -1,
        -1,
        0,
        False,
    )


def test_fields_written_together_are_read() -> None:
    writer, buffer = page()
    writer.write(generation=3, step=7, gate=6, attempts=9, main_state=RUNNING, phase="run")
    writer.write_collective("all_reduce #12 of 'dp' [4, 8] float32")
    writer.beat()
    progress = ProgressPage(buffer).read()
    assert (progress.generation, progress.step, progress.gate) == (3, 7, 6)
    assert (progress.attempts, progress.main_state, progress.phase) == (9, RUNNING, "run")
    assert progress.last_collective == "all_reduce #12 of 'dp' [4, 8] float32"
    assert progress.heartbeat == 1


def test_a_field_not_given_keeps_its_value() -> None:
    writer, _ = page()
    writer.write(step=1, phase="run")
    writer.write(step=2)
    assert (writer.read().step, writer.read().phase) == (2, "run")


def test_long_text_is_cut_and_stays_readable() -> None:
    writer, _ = page()
    writer.write(phase="ä" * 500)
    writer.write_collective("x" * 5000)
    progress = writer.read()
    assert progress.phase.startswith("ä" * 100)
    assert progress.last_collective == "x" * 1022


def test_a_writer_stopped_half_way_is_seen() -> None:
    writer, buffer = page()
    writer.write(step=4)
    memoryview(buffer).cast("q")[1] += 1  # the version counter: odd while writing
    progress = writer.read()
    assert progress.is_torn
    assert progress.step == 4


def test_the_fence_is_the_agents_field() -> None:
    writer, buffer = page()
    ProgressPage(buffer).set_fence(5)
    assert writer.fence_generation == 5
    writer.write(generation=4)
    assert writer.fence_generation == 5


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="4096 bytes"):
        ProgressPage(bytearray(100))
