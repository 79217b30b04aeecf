"""`trainmover check`: finds in the first steps what would break exact recovery later.

At step 2 the attempt is undone in front of its gate although nothing has failed, and repeated:
whatever differs then would differ after a real loss. On a standby, writes to files are noted.
Decides nothing about the job: every rank does the same at the same step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from trainmover.state.rng import capture_rng, differing_generators
from trainmover.worker import carried
from trainmover.worker.sequence import script_place

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

UNDONE_VERSION = 2
"""Version at which the fault-free undo happens; DDP's bucket rebuild is behind it."""
STEPS_BEHIND_SWITCHOVER = 3


@dataclass
class Trace:
    """What one attempt has done up to its gate."""

    rng: bytes
    logged: dict[str, str]
    sequence: str
    gradients: dict[str, str] = field(default_factory=dict)
    batches: tuple[str, ...] = ()


class SelfCheck:
    """One rank's part in a check run."""

    def __init__(self, stepper: Stepper, finding: Callable[[str, str], None]) -> None:
        self._stepper = stepper
        self._finding = finding
        self._first: Trace | None = None
        self._is_compared = False
        self._switched_at: int | None = None
        self._variables: list[carried.Variables] = []
        self._batch_ids: frozenset[int] = frozenset()

    @property
    def is_rehearsing(self) -> bool:
        """Between the fault-free undo and the repeated attempt."""
        return self._first is not None and not self._is_compared

    def begin_attempt(self) -> None:
        """The step begins: remember what the script's variables hold, twice."""
        if self._stepper.version.step == UNDONE_VERSION and not self._is_compared:
            self._variables.append(carried.variables())

    def at_gate(self) -> bool:
        """Called with complete gradients. True: undo this attempt although nothing has failed."""
        stepper = self._stepper
        if stepper.version.step != UNDONE_VERSION or self._is_compared:
            return False
        trace = self._trace()
        if self._first is None:
            self._first = trace
            self._batch_ids = carried.tensor_ids(self._batches_of_attempt())
            return True
        self._is_compared = True
        self._compare(self._first, trace)
        return False

    def _trace(self) -> Trace:
        stepper = self._stepper
        return Trace(
            rng=capture_rng(),
            logged=dict(stepper.logbook.before_gate),
            sequence=stepper.watch.open_digest,
            gradients={
                name: _digest(parameter.grad)
                for name, parameter in stepper.inventory.parameters()
                if parameter.grad is not None
            },
            batches=tuple(_digest(batch) for batch in self._batches_of_attempt()),
        )

    def _batches_of_attempt(self) -> list[Any]:
        return [batch for batches in self._stepper.batches for batch in batches.of_attempt()]

    def _compare(self, first: Trace, second: Trace) -> None:
        names = differing_generators(first.rng, second.rng)
        if names:
            self._finding(
                "repeat",
                f"step 2 undone and repeated: random generators differ: {', '.join(names)}",
            )
        if first.batches != second.batches:
            self._finding("repeat", "step 2 undone and repeated: it got other batches")
        if first.sequence != second.sequence:
            self._finding(
                "repeat",
                "step 2 undone and repeated: other collectives were called; what they depend on is "
                "not undone: job.track() it",
            )
        logged = sorted(
            name for name in first.logged if first.logged[name] != second.logged.get(name)
        )
        changed = sorted(
            name for name, digest in first.gradients.items() if digest != second.gradients.get(name)
        )
        if logged or changed:
            self._tell_numbers(", ".join([f"step.log({name})" for name in logged] or changed[:3]))

    def _tell_numbers(self, what: str) -> None:
        seen = f"step 2 undone and repeated: {what} differs though tracked state is equal"
        before, after = self._variables[0], self._variables[1]
        found = carried.suspects(before, after, self._batch_ids)
        for suspect in found:
            remedy = (
                "take every batch inside its step (job.batches(fn, prefetch=1) reads ahead)"
                if suspect.is_batch
                else "job.track() it, for a number as trainmover.Value(...), or use step.index"
            )
            self._finding(
                "carried",
                f"{suspect.place}: {suspect.name!r} carries {suspect.kind} from one step to the "
                f"next; {seen}. Remedy: {remedy}",
            )
        if not found:
            self._finding(
                "repeat",
                f"{seen}. Either a batch is carried over from one step to the next (take it inside "
                "the step) or a value the loss depends on is not tracked (a counter, a list)",
            )

    def total(self, asked: int, generation: int, index: int) -> int:
        """A check run ends some steps behind its switchover; the same on every rank, because the
        generation changes at the same boundary everywhere."""
        if generation > 1 and self._switched_at is None:
            self._switched_at = index
        if self._switched_at is None:
            return asked
        return min(asked, self._switched_at + STEPS_BEHIND_SWITCHOVER)


def _digest(value: Any) -> str:
    hasher = xxhash.xxh3_64()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", None)
        tensor = local() if callable(local) else value
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(str((flat.dtype, tuple(tensor.shape))).encode())
        if flat.numel():
            hasher.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in value:
            hasher.update(repr(key).encode())
            _feed(hasher, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(repr(value).encode())


SKIPPED = ("/trainmover/", "/torch/", os.path.dirname(os.__file__) + "/")
"""Callers that are not the script: it is told where it asked for the write."""

WRITING_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate")


class WriteWatch:
    """Notes files that a standby's script writes while it plays a rank it does not have."""

    def __init__(self, finding: Callable[[str, str], None], is_shadow: Callable[[], bool]) -> None:
        self._finding = finding
        self._is_shadow = is_shadow
        self._seen: set[str] = set()
        self._pid = os.getpid()

    def install(self) -> None:
        """For the life of this process (audit hooks can't be removed)."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            mode = arguments[1]
            if not isinstance(mode, str) or not set(mode) & set("wax+"):
                return
        elif event not in WRITING_EVENTS:
            return
        if os.getpid() != self._pid or not self._is_shadow():
            return
        place = script_place(SKIPPED)
        if place == "unknown place" or place in self._seen:
            return
        self._seen.add(place)
        self._finding(
            "shadow-write",
            f"{place}: a standby writes to {arguments[0]!r} while it rehearses; the live job's "
            "file would be changed. Put it under `if job.is_primary:`",
        )
