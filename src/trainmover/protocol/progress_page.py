"""One page of shared memory per worker: where it is, readable even when it is stopped.

Decides the layout only. The worker writes (step, gate, last collective, ...), its agent reads at
any time, without asking the worker's interpreter; the agent writes exactly one field, the fence.

Fields are 8-byte words in native order, so that one word is never seen half-written; a version
counter, odd while the worker writes, tells a reader that several words belong together.
"""

from __future__ import annotations

import mmap
from typing import Final

import msgspec

PAGE_BYTES: Final = 4096
MAGIC: Final = 0x7472_6D76_7067_0001

NOT_STARTED: Final = 0
RUNNING: Final = 1
IN_COLLECTIVE: Final = 2
WAITING_AT_BOUNDARY: Final = 3
WAITING_IN_GATE: Final = 4
RUNNING_OUT: Final = 5
FINISHED: Final = 6

MAIN_STATES: Final = {
    NOT_STARTED: "not started",
    RUNNING: "running",
    IN_COLLECTIVE: "in a collective",
    WAITING_AT_BOUNDARY: "waiting at a boundary",
    WAITING_IN_GATE: "waiting in the gate",
    RUNNING_OUT: "running out",
    FINISHED: "finished",
}

_MAGIC = 0
_COUNTER = 1
_GENERATION = 2
_STEP = 3
_GATE = 4
_ATTEMPTS = 5
_HEARTBEAT = 6
_MAIN_STATE = 7
_FENCE = 8
_WORDS = 16
_PHASE_AT = 256
_PHASE_BYTES = 256
_COLLECTIVE_AT = 512
_COLLECTIVE_BYTES = 1024
_READ_TRIES = 4


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker had written when its page was read."""

    generation: int = 0
    step: int = -1
    gate: int = -1
    """Last gate passed; -1 before the first."""
    attempts: int = 0
    heartbeat: int = 0
    """Grows with every pass of the worker's I/O thread."""
    main_state: int = NOT_STARTED
    phase: str = ""
    last_collective: str = ""
    is_torn: bool = False
    """The writer was in the middle of an update each time we looked (it may be stopped there)."""


class ProgressPage:
    """View of one page; the worker's and the agent's side are the same class.

    Each setter writes one field; only one thread of the worker may write at a time.
    """

    def __init__(self, buffer: mmap.mmap | bytearray | memoryview) -> None:
        view = memoryview(buffer)
        if view.nbytes < PAGE_BYTES or view.readonly:
            text = f"expected a writable buffer of {PAGE_BYTES} bytes, got {view.nbytes}"
            raise ValueError(text)
        self._bytes = view.cast("B")
        self._words = self._bytes[: _WORDS * 8].cast("q")

    def initialise(self) -> None:
        """Write the empty page; the agent does it before the worker is launched."""
        self._bytes[:PAGE_BYTES] = bytes(PAGE_BYTES)
        self._words[_STEP] = -1
        self._words[_GATE] = -1
        self._words[_MAGIC] = MAGIC

    @property
    def is_initialised(self) -> bool:
        """Whether this is a page of this layout."""
        return self._words[_MAGIC] == MAGIC

    # ------------------------------------------------------------------ the worker's side

    def write(
        self,
        *,
        generation: int | None = None,
        step: int | None = None,
        gate: int | None = None,
        attempts: int | None = None,
        main_state: int | None = None,
        phase: str | None = None,
    ) -> None:
        """Change the given fields together."""
        words = self._words
        words[_COUNTER] += 1
        if generation is not None:
            words[_GENERATION] = generation
        if step is not None:
            words[_STEP] = step
        if gate is not None:
            words[_GATE] = gate
        if attempts is not None:
            words[_ATTEMPTS] = attempts
        if main_state is not None:
            words[_MAIN_STATE] = main_state
        if phase is not None:
            self._write_text(_PHASE_AT, _PHASE_BYTES, phase)
        words[_COUNTER] += 1

    def write_collective(self, text: str) -> None:
        """Name the collective that the main thread enters."""
        self._words[_COUNTER] += 1
        self._write_text(_COLLECTIVE_AT, _COLLECTIVE_BYTES, text)
        self._words[_COUNTER] += 1

    def beat(self) -> None:
        """Say that the I/O thread lives; one word, no version counter."""
        self._words[_HEARTBEAT] += 1

    @property
    def fence_generation(self) -> int:
        """Generation this worker may pass gates of; 0: no fence. Another number: hold and ask."""
        return self._words[_FENCE]

    # ------------------------------------------------------------------- the agent's side

    def set_fence(self, generation: int) -> None:
        """Let no gate of another generation pass here; 0 lifts the fence."""
        self._words[_FENCE] = generation

    def read(self) -> Progress:
        """A consistent copy, or the last one seen marked `is_torn`. Never blocks."""
        progress = Progress(is_torn=True)
        for _ in range(_READ_TRIES):
            before = self._words[_COUNTER]
            words = self._words
            progress = Progress(
                generation=words[_GENERATION],
                step=words[_STEP],
                gate=words[_GATE],
                attempts=words[_ATTEMPTS],
                heartbeat=words[_HEARTBEAT],
                main_state=words[_MAIN_STATE],
                phase=self._read_text(_PHASE_AT, _PHASE_BYTES),
                last_collective=self._read_text(_COLLECTIVE_AT, _COLLECTIVE_BYTES),
                is_torn=before % 2 == 1,
            )
            if before % 2 == 0 and self._words[_COUNTER] == before:
                return progress
        return msgspec.structs.replace(progress, is_torn=True)

    def release(self) -> None:
        """Give the buffer back, so that its owner can close it."""
        self._words.release()
        self._bytes.release()

    def _write_text(self, at: int, room: int, text: str) -> None:
        data = text.encode("utf-8", "replace")[: room - 2]
        self._bytes[at + 2 : at + 2 + len(data)] = data
        self._bytes[at : at + 2] = len(data).to_bytes(2, "little")

    def _read_text(self, at: int, room: int) -> str:
        length = min(int.from_bytes(self._bytes[at : at + 2], "little"), room - 2)
        return bytes(self._bytes[at + 2 : at + 2 + length]).decode("utf-8", "replace")
