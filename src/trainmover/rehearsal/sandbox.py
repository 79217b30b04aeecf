"""Answers a rehearsing standby's collectives: from a recording, in loop-back, or with zeros.

Decides which recorded call a call of the standby is: by order within its group, kind, shape and
dtype; point-to-point calls by order per peer. A call that is not there is refused and named. What
the recording has no values for (barriers, sends) is answered in loop-back. Groups inside a machine
are real among the machine's workers where these rehearse together, else answered in loop-back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from trainmover.communicator import answers
from trainmover.communicator.call import Call
from trainmover.communicator.communicator import Communicator
from trainmover.communicator.operation import Operation
from trainmover.errors import RecordingError, RehearsalMismatch
from trainmover.rehearsal.calls import SILENT, CallShape, Describer
from trainmover.rehearsal.neighbours import Neighbours
from trainmover.rehearsal.recording import Entry, Recording

NOTHING = "no further collective"


class _Playback:
    """Recorded calls of one iteration, in the order in which they may come."""

    def __init__(self, entries: Iterable[Entry], *, is_exact: bool) -> None:
        self._lists: dict[int, list[Entry]] = defaultdict(list)
        self._places: dict[int, int] = defaultdict(int)
        self._messages: dict[CallShape, deque[Entry]] = defaultdict(deque)
        self._is_exact = is_exact
        for entry in entries:
            if entry.shape.is_point_to_point:
                self._messages[entry.shape].append(entry)
            else:
                self._lists[entry.shape.group].append(entry)

    def take(self, shape: CallShape) -> Entry | None:
        """The recorded call that `shape` is; None: there is none."""
        if shape.is_point_to_point:
            waiting = self._messages[shape]
            first: Entry | None = waiting.popleft() if waiting else None
            return first
        entries, at = self._lists[shape.group], self._places[shape.group]
        if at < len(entries) and entries[at].shape == shape:
            self._places[shape.group] = at + 1
            return entries[at]
        if self._is_exact:
            return None
        # An iteration behind the recorded ones lacks what only a first one does (the order of
        # DDP's buckets, shapes told from stage to stage).
        others: list[int] = [*range(at + 1, len(entries)), *range(at)]
        for index in others:
            if entries[index].shape == shape:
                self._places[shape.group] = index + 1
                return entries[index]
        return None

    def expected(self, shape: CallShape) -> str:
        """What would have been right, for people."""
        if shape.is_point_to_point:
            left = [entries[0] for entries in self._messages.values() if entries]
        else:
            left = self._lists[shape.group][self._places[shape.group] :]
            left = left or [e for g in sorted(self._lists) for e in self._lists[g]][-1:]
            if self._places[shape.group] >= len(self._lists[shape.group]):
                return NOTHING
        return f"{left[0].shape.words()} ({left[0].place})" if left else NOTHING


class Sandbox:
    """Answers of one rehearsal of one class."""

    def __init__(
        self,
        communicator: Communicator,
        recording: Recording | None,
        workers_per_machine: int,
        place: Callable[[], str],
        *,
        gives_zeros: bool = False,
        neighbours: Neighbours | None = None,
    ) -> None:
        """Nothing is answered before `begin`.

        Args:
            communicator: Of the standby, in loop-back.
            recording: Of the class; None: there is none.
            workers_per_machine: Tells which groups span machines.
            place: File and line of the script that calls.
            gives_zeros: Without a recording, answer crossing collectives with zeros, to show that
                they are not good enough; else in loop-back.
            neighbours: Who answers groups inside the machine; None: loop-back.
        """
        self._communicator = communicator
        self._recording = recording
        self._place = place
        self._describer = Describer(workers_per_machine)
        self._playback: _Playback | None = None
        self._iteration = -1
        self._calls = 0
        self._spent: dict[CallShape, int] = {}
        self._values = _values_by_shape(recording)
        self._gives_zeros = gives_zeros
        self.neighbours = neighbours
        self.guessed: set[CallShape] = set()
        """Calls the recording has values for that do not fit: their sizes depend on the data."""
        self.seen: set[CallShape] = set()
        """Every call so far, whatever its group."""
        self.mismatch = ""
        """The refused call, once there is one; a script may swallow the exception."""

    def begin(self) -> None:
        """A shadow iteration starts."""
        self._iteration += 1
        self._calls = 0
        self._spent = {}
        if self._recording is not None:
            iterations = self._recording.header.iterations
            number = min(self._iteration, len(iterations) - 1)
            is_exact = self._iteration < len(iterations)
            self._playback = _Playback(iterations[number], is_exact=is_exact)
        self._communicator.interpose(self._start)

    def end(self) -> None:
        """The iteration is over. Raises RehearsalMismatch if a refusal was swallowed."""
        self._communicator.interpose(None)
        if self.mismatch:
            raise RehearsalMismatch(self.mismatch)

    def close(self) -> None:
        """Answer nothing any more."""
        self._communicator.interpose(None)
        if self.neighbours is not None:
            self.neighbours.close()
        if self._recording is not None:
            self._recording.close()

    def _start(self, call: Call) -> Operation | None:
        self._calls += 1
        shape = self._describer.describe(call)
        self.seen.add(without_group(shape))
        is_inside = not shape.crosses and self.neighbours is not None and shape.size > 1
        if self._playback is None:
            if is_inside:
                return self._ask_neighbours(call)
            if shape.crosses and self._gives_zeros:
                answers.zeros(call)
            else:
                answers.loop_back(call)
            return None
        entry = self._playback.take(shape)
        if entry is None:
            self._refuse(shape, self._playback.expected(shape))
        occurrence = self._spent.get(shape, 0)
        self._spent[shape] = occurrence + 1
        if is_inside:
            return self._ask_neighbours(call)
        self._answer(call, shape, occurrence)
        return None

    def _ask_neighbours(self, call: Call) -> Operation | None:
        assert self.neighbours is not None
        return self.neighbours.start(call)

    def _answer(self, call: Call, shape: CallShape, occurrence: int) -> None:
        stored = self._values.get(shape, [])
        if call.kind in SILENT or not stored or not call.outputs:
            answers.loop_back(call)
            return
        assert self._recording is not None
        kept = self._recording.tensors(stored[occurrence % len(stored)])
        if _fits(call.outputs, kept):
            answers.recorded(call, kept)
        else:
            self.guessed.add(without_group(shape))
            answers.loop_back(call)

    def _refuse(self, shape: CallShape, expected: str) -> None:
        text = (
            f"rehearsal: collective {self._calls} of iteration {self._iteration + 1}: expected "
            f"{expected}, got {shape.words()}, called at {self._place()}"
        )
        self.mismatch = self.mismatch or text
        raise RehearsalMismatch(text)


def _values_by_shape(recording: Recording | None) -> dict[CallShape, list[Entry]]:
    """Entries that have values, by what was called, in order; the fullest iteration's."""
    found: dict[CallShape, list[Entry]] = {}
    for entries in recording.header.iterations if recording is not None else ():
        here: dict[CallShape, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.values is not None:
                here[entry.shape].append(entry)
        for shape, kept in here.items():
            if len(kept) >= len(found.get(shape, [])):
                found[shape] = kept
    return found


def without_group(shape: CallShape) -> CallShape:
    """What makes a call new: not in which order its group came."""
    return msgspec.structs.replace(shape, group=0)


def _fits(outputs: list[torch.Tensor], kept: list[torch.Tensor]) -> bool:
    return len(outputs) == len(kept) and all(
        output.numel() == value.numel() and output.dtype == value.dtype
        for output, value in zip(outputs, kept, strict=True)
    )


def open_recording(path: str | Path, fingerprint: str, role_class: str) -> Recording:
    """The recording at `path`, if it is of this script and class. Raises RecordingError."""
    recording = Recording(Path(path))
    header = recording.header
    if (header.fingerprint, header.role_class) != (fingerprint, role_class):
        recording.close()
        raise RecordingError(
            f"{path}: expected a recording of class {role_class} under fingerprint {fingerprint}, "
            f"got class {header.role_class} under {header.fingerprint}"
        )
    return recording
