"""Keeps what collectives gave a member in the job's first iteration; afterwards it is gone.

Decides what is kept: outputs of calls whose group spans machines, of one iteration (of two where
DDP lays out its buckets anew in the second), in memory, up to a limit. An undone attempt is
forgotten. Between the iterations and after them the communicator is what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trainmover.communicator.call import Call
from trainmover.communicator.communicator import Communicator
from trainmover.communicator.operation import Operation
from trainmover.communicator.settings import Mode
from trainmover.rehearsal.calls import SILENT, CallShape, Describer
from trainmover.rehearsal.classes import class_digest
from trainmover.rehearsal.recording import Draft, Entry, Header

Kept = list[torch.Tensor] | None


@dataclass
class _Iteration:
    entries: list[Entry] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    is_void: bool = False
    """Some value was invented: this attempt says nothing."""

    @property
    def shapes(self) -> list[CallShape]:
        return [entry.shape for entry in self.entries]

    def bytes(self) -> int:
        return sum(_bytes(kept) for kept in self.kept)


class _Observed:
    """An operation whose future completes once its outputs are copied: the script may change them
    as soon as it is woken."""

    def __init__(self, operation: Operation, future: Any) -> None:
        self._operation = operation
        self.future = future

    @property
    def source(self) -> int:
        return self._operation.source


class Recorder:
    """The first iterations of one member."""

    def __init__(
        self,
        communicator: Communicator,
        workers_per_machine: int,
        limit_bytes: int,
        place: Callable[[], str],
        *,
        keeps: bool = True,
    ) -> None:
        """Record nothing yet.

        Args:
            communicator: Whose calls are seen between `begin` and `end`.
            workers_per_machine: Tells which groups span machines.
            limit_bytes: Most memory for values.
            place: File and line of the script that calls.
            keeps: False: only the sequence is seen (a recording exists already).
        """
        self._communicator = communicator
        self._limit_bytes = limit_bytes
        self._place = place
        self._keeps = keeps
        self._iterations: list[_Iteration] = []
        self._open: _Iteration | None = None
        self._describer = Describer(workers_per_machine)
        self.is_over_limit = False

    def begin(self) -> None:
        """An attempt of an iteration starts."""
        self.undone()
        self._communicator.interpose(self._start)

    def undone(self) -> None:
        """The attempt is repeated: what it saw is forgotten."""
        self._open = _Iteration()

    def end(self) -> bool:
        """The attempt is over; whether it counts (no value in it was invented)."""
        self._communicator.interpose(None)
        iteration, self._open = self._open, None
        if iteration is None or iteration.is_void or self._communicator.tainted:
            return False
        self._iterations.append(iteration)
        return True

    def drop(self) -> None:
        """Let go of everything."""
        self._communicator.interpose(None)
        self._iterations = []
        self._open = None

    @property
    def count(self) -> int:
        """Iterations seen."""
        return len(self._iterations)

    @property
    def bytes(self) -> int:
        """Bytes held, once `settle` has left out what another iteration has as well."""
        return sum(iteration.bytes() for iteration in self._iterations)

    def role_class(self, state: str) -> str:
        """Digest of the class of this rank; `state`: of the shapes of its state."""
        return class_digest(state, (iteration.shapes for iteration in self._iterations))

    def settle(self) -> None:
        """Keep no more than the crossing bytes of one iteration.

        A later iteration's values stand in for an earlier one's of the same call; of what only an
        earlier one has, the smallest are kept (DDP's first, single bucket is not: loop-back values
        of one's own gradients are as good there, while the order of its buckets must be true).
        """
        if not self._iterations:
            return
        bound = max(iteration.bytes() for iteration in self._iterations)
        total = 0
        have: Counter[CallShape] = Counter()
        spare: list[tuple[int, int, int]] = []
        for number in range(len(self._iterations) - 1, -1, -1):
            seen: Counter[CallShape] = Counter()
            for index, shape in enumerate(self._iterations[number].shapes):
                kept = self._iterations[number].kept[index]
                if kept is None:
                    continue
                seen[shape] += 1
                size = _bytes(kept)
                if number == len(self._iterations) - 1:
                    total += size
                elif seen[shape] <= have[shape]:
                    self._iterations[number].kept[index] = None
                else:
                    spare.append((size, number, index))
            have |= seen
        for size, number, index in sorted(spare):
            if total + size > bound:
                self._iterations[number].kept[index] = None
            else:
                total += size

    def draft(self, fingerprint: str, role_class: str, state: str, ranks: tuple[int, ...]) -> Draft:
        """What goes into the file."""
        header = Header(
            fingerprint=fingerprint,
            role_class=role_class,
            state=state,
            ranks=ranks,
            torch=str(torch.__version__),
            iterations=tuple(tuple(iteration.entries) for iteration in self._iterations),
        )
        return Draft(header, [iteration.kept for iteration in self._iterations])

    # ------------------------------------------------------------------ the hook

    def _start(self, call: Call) -> Any:
        iteration = self._open
        if iteration is None:
            return Communicator.start(self._communicator, call)
        index = len(iteration.entries)
        shape = self._describer.describe(call)
        iteration.entries.append(Entry(shape, self._place()))
        iteration.kept.append(None)
        operation = Communicator.start(self._communicator, call)
        if operation is None:
            iteration.is_void = True
            return None
        if not self._keeps or call.kind in SILENT or not shape.crosses or self.is_over_limit:
            return operation
        future = operation.future.then(lambda done: self._completed(done, call, iteration, index))
        return _Observed(operation, future)

    def _completed(self, done: Any, call: Call, iteration: _Iteration, index: int) -> Any:
        result = done.value()
        if self._communicator.mode is not Mode.LIVE:
            iteration.is_void = True
            return result
        with torch.no_grad():
            copies = [output.detach().clone() for output in call.outputs]
        iteration.kept[index] = copies
        held = sum(each.bytes() for each in self._iterations) + iteration.bytes()
        if held > self._limit_bytes:
            self.is_over_limit = True
            for each in (*self._iterations, iteration):
                each.kept = [None] * len(each.kept)
        return result


def _bytes(kept: Kept) -> int:
    return 0 if kept is None else sum(tensor.nbytes for tensor in kept)
