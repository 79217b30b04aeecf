"""Data connections between simulated workers, with their frames.

Frames of one direction arrive in order, late by a random delay; a break loses a random tail of what
is on its way; a cut holds everything back until it heals or the connection gives up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainmover.protocol.messages import Edge, Plan, Version

if TYPE_CHECKING:
    from trainmover.simulation.increments import Update
    from trainmover.simulation.numbers import Numbers
    from trainmover.simulation.process import Process
    from trainmover.simulation.world import World

GIVE_UP_S = 12.0
"""After which a connection whose path is cut breaks."""


@dataclass(frozen=True, slots=True)
class Data:
    """One rank's part in the collectives of a step."""

    generation: int
    step: int
    rank: int
    value: int


@dataclass(frozen=True, slots=True)
class TailData:
    """One rank's part in the collective behind a gate."""

    generation: int
    step: int
    rank: int
    value: int


@dataclass(frozen=True, slots=True)
class GateFrame:
    """One round of a gate."""

    generation: int
    step: int
    round: int
    kind: int
    vector: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Personal:
    """Personal state on its way to a backup."""

    generation: int
    owner: int
    version: Version
    value: int
    is_final: bool
    updates: tuple[Update, ...] = ()
    """In front of it, to the nearest backup: what leads to this version."""


@dataclass(frozen=True, slots=True)
class Poison:
    """The sender has marked the generation broken."""

    generation: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class CutMark:
    """Behind this, an inherited channel carries nothing of the generation before."""

    generation: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A joiner asks a source for one part of its state."""

    generation: int
    part: str
    rank: int
    base: Version | None = None
    """Of updates: the version they begin at."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a joiner's state."""

    generation: int
    part: str
    version: Version
    value: int
    updates: tuple[Update, ...] = ()


Frame = Data | TailData | GateFrame | Personal | Poison | CutMark | Ask | Part


@dataclass
class Channel:
    """One connection; both ends hold the same object."""

    world: World
    ends: tuple[Process, Process]
    is_broken: bool = False
    arrivals: dict[str, int] = field(default_factory=dict)
    """Latest arrival so far, by sender: keeps each direction in order."""
    last_instant: dict[str, int] = field(default_factory=dict)
    """By sender: frames that would arrive later are lost by a break."""

    def other(self, end: Process) -> Process:
        """The process at the other end."""
        return self.ends[1] if self.ends[0] is end else self.ends[0]

    def send(self, sender: Process, frame: Frame) -> None:
        """Put `frame` on its way; into a broken channel it is lost."""
        if self.is_broken:
            return
        world = self.world
        delay = world.delay_ns(world.scenario.channel_delay_s)
        arrival = max(world.schedule.now + delay, self.arrivals.get(sender.name, 0))
        self.arrivals[sender.name] = arrival
        world.schedule.at(arrival, lambda: self._arrive(sender, frame, 0))

    def _arrive(self, sender: Process, frame: Frame, waited: int) -> None:
        world = self.world
        if world.schedule.now > self.last_instant.get(sender.name, world.schedule.now):
            return
        receiver = self.other(sender)
        healed_at = world.cuts.get(world.path(sender.machine, receiver.machine), 0)
        if healed_at > world.schedule.now and not self.is_broken:
            again = max(healed_at, self.arrivals[sender.name])
            self.arrivals[sender.name] = again
            world.schedule.at(again, lambda: self._arrive(sender, frame, waited + 1))
            return
        receiver.defer(lambda: receiver.receive(self, sender, frame))

    def fail(self, reason: str, *, by: Process | None = None, is_silent: bool = False) -> None:
        """Break the connection; each end but `by` notices within a moment."""
        if self.is_broken:
            return
        self.is_broken = True
        now = self.world.schedule.now
        for end in self.ends:
            sender = self.other(end)
            cutoff = now + self.world.delay_ns(self.world.scenario.channel_delay_s)
            self.last_instant[sender.name] = cutoff
            if end is not by and not is_silent:
                self._notify(end, sender, reason, cutoff)

    def _notify(self, end: Process, sender: Process, reason: str, at: int) -> None:
        edge = Edge(peer=sender.name, reason=reason)
        notice = lambda: end.defer(lambda: end.channel_broken(self, edge))  # noqa: E731
        self.world.schedule.at(at + 1, notice)


@dataclass
class CutOverWork:
    """What one process still has to do for a cut-over (W14)."""

    plan: Plan
    is_joiner: bool
    is_leaver: bool
    peers: tuple[str, ...]
    """Incarnations a channel is needed to."""
    marked: set[str] = field(default_factory=set)
    asked: bool = False
    is_held_up: bool = False
    """The main thread still fetches something else."""
    parts: dict[str, Part] = field(default_factory=dict)
    base: Numbers | None = None
    """Snapshot that updates are played on."""
    served: set[str] = field(default_factory=set)
    is_loaded: bool = False
    is_reseeded: bool = False
    is_done: bool = False
    inherited: int = 0
    opened: int = 0
    proceed: Callable[[], None] = lambda: None
    """What to do when more has arrived."""
