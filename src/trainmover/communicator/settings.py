"""Nouns the communicator shares with its users: identity, configuration, events, modes.

Decides nothing; everything here is data or a signature.
"""

from __future__ import annotations

import enum
import socket
from dataclasses import dataclass
from typing import Protocol

from trainmover.errors import CollectiveMismatch, ConfigError
from trainmover.units import KIB, MIB


class Mode(enum.Enum):
    """How collectives are answered at present."""

    LOOPBACK = "loopback"
    """At once, as if every peer had sent what this rank sent (a standby without a role)."""
    LIVE = "live"
    """By talking to the members of the current generation."""
    RUN_OUT = "run_out"
    """At once, with valid values, so that an interrupted step ends by itself."""


class Place(enum.Enum):
    """Where a rank's main thread is, for peers that wait for it."""

    BUILDING = "building"
    """On its way to the first boundary; bounded by the worker itself."""
    INSIDE = "inside"
    """In front of a gate, in user code or in a collective."""
    AT_GATE = "at the gate"
    """Waits for others."""
    OUTSIDE = "outside"
    """Behind a gate or between steps, or in its first step (which may compile)."""


@dataclass(frozen=True, slots=True)
class ChannelIdentity:
    """Who this process is on the data plane."""

    job: str
    incarnation: str
    """One process life; plans name incarnations, never hosts."""
    machine: str
    """Machine it plays; shared memory is used between equal machines only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicatorConfig:
    """Limits of the data plane."""

    connect_timeout_s: float = 10.0
    """Longest time for one channel to be connected and authenticated, retries included."""
    handshake_timeout_s: float = 5.0
    """A socket that has not proved itself by then is closed; bounds strangers' sockets."""
    parked_timeout_s: float = 60.0
    """How long an authenticated channel of a generation unknown here is kept: its plan may
    still be on its way to this rank."""
    cut_over_timeout_s: float = 10.0
    """Longest wait for the peers' MARK on inherited channels."""
    chunk_bytes: int = 1 * MIB
    """Payload of one data frame of a large message: smaller means finer overlap, more frames."""
    inline_bytes: int = 32 * KIB
    """Frames up to this size are taken over only when complete, never half; larger ones are
    received straight into their target."""
    eager_bytes: int = 256 * KIB
    """Payloads up to this size are sent by the calling thread itself, which saves a thread switch;
    larger ones of asynchronous calls are left to the I/O thread, so that computing goes on beside
    them."""
    small_bytes: int = 32 * KIB
    """All-reduces up to this size use recursive doubling (fewest rounds)."""
    unexpected_bytes: int = 256 * MIB
    """Data buffered per channel before its collective is called; beyond it reading pauses."""
    socket_buffer_bytes: int = 0
    """Kernel send and receive buffers per channel; 0 leaves their size to the kernel, which grows
    them as needed. A fixed size is cut to `net.core.rmem_max`, often far below what it would
    grow to."""
    tcp_user_timeout_s: float = 20.0
    """Unacknowledged data for this long breaks a channel (cut cable); 0 leaves it to the OS."""
    collective_timeout_s: float = 60.0
    """Silence of a rank, inside a step, after which one that waits for it in a collective, a
    receive or a gate reports it: the step is undone and repeated over new connections, and a rank
    that can't even run out is replaced. The smaller of this and the group's own limit counts.
    Shorter finds a hang sooner; longer tolerates ranks that compute for longer than others."""
    outside_step_limit_s: float = 600.0
    """The same for a rank that is outside a step: rank 0 may save or evaluate for so long while
    the others wait in the next step's first collective. Shorter finds a hang there sooner."""
    keepalive_s: float = 10.0
    """Idle time before the kernel probes a silent peer; 0 switches probes off."""
    does_reuse_channels: bool = True
    """Keep channels between workers that stay, after a loss; false: every rank opens all of its
    channels anew. Only there to measure what keeping them is worth (`bench ablation`)."""
    use_shared_memory: bool = True
    """Large payloads between workers of one machine go through shared memory."""
    shared_memory_bytes: int = 4 * MIB
    """Ring per direction of a same-machine channel."""
    shared_memory_min_bytes: int = 8 * KIB
    """Smaller payloads travel in the socket, with their header."""
    close_timeout_s: float = 1.0
    """Time `close` gives queued frames to leave."""

    def __post_init__(self) -> None:
        if self.inline_bytes > self.chunk_bytes:
            raise ConfigError(
                f"inline_bytes ({self.inline_bytes}) must not exceed chunk_bytes "
                f"({self.chunk_bytes}); lower inline_bytes"
            )
        if self.handshake_timeout_s > self.connect_timeout_s:
            raise ConfigError(
                f"handshake_timeout_s ({self.handshake_timeout_s}) must not exceed "
                f"connect_timeout_s ({self.connect_timeout_s})"
            )
        if not 0 < self.collective_timeout_s <= self.outside_step_limit_s:
            raise ConfigError(
                f"communicator.collective_timeout_s ({self.collective_timeout_s}) must be above 0 "
                "and at most communicator.outside_step_limit_s "
                f"({self.outside_step_limit_s}); change one"
            )
        if self.chunk_bytes % 64 or self.shared_memory_bytes < 2 * self.chunk_bytes:
            raise ConfigError(
                "chunk_bytes must be a multiple of 64 and at most half of shared_memory_bytes; "
                f"got {self.chunk_bytes} and {self.shared_memory_bytes}"
            )


@dataclass(frozen=True, slots=True)
class ChannelCount:
    """Channels of one change of generation, as this rank saw them."""

    inherited: int
    opened: int
    closed: int


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """One open channel, for assertions and reports."""

    id: int
    """Unique in this process; an inherited channel keeps it."""
    peer: str
    opened_at: int
    """Value of the opened counter when it was opened."""
    fd: int
    is_shared_memory: bool
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective at its entry, for fingerprints and progress."""

    group: str
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    op: str
    sequence: int


class CommunicatorEvents(Protocol):
    """What the worker's lifecycle is told; every method is called on the I/O thread."""

    def channel_broken(self, generation: int, peer: str, reason: str) -> None:
        """A channel of the current generation broke, or its peer is overdue."""

    def poisoned(self, generation: int, peer: str, edges: tuple[tuple[str, str], ...]) -> None:
        """`peer` broke the current generation because of the failed `edges`."""

    def gate_completed(self, generation: int, step: int, kind: int, flags: tuple[int, ...]) -> None:
        """Every rank contributed; `flags` is the element-wise maximum."""

    def gate_mismatch(self, generation: int, step: int, detail: str) -> None:
        """A peer entered the same gate with another kind or number of flags."""

    def control(
        self, from_rank: int, kind: int, generation: int, step: int, payload: bytes
    ) -> None:
        """A small message of a peer."""

    def next_generation_frame(self, generation: int) -> None:
        """A peer already runs in `generation`, which is cut over but not committed here."""

    def prepared(self, generation: int) -> None:
        """All channels `generation` needs are open."""

    def prepare_failed(self, generation: int, peer: str, reason: str) -> None:
        """A channel of `generation` could not be opened, or broke before the cut-over."""

    def cut_over_done(self, generation: int, channels: ChannelCount) -> None:
        """Inherited streams are flushed up to `generation`."""

    def cut_over_failed(self, generation: int, peer: str, reason: str) -> None:
        """`peer` did not follow, or its new channel broke, before the commit."""

    def stream_accepted(
        self, purpose: str, generation: int, peer: str, stream: socket.socket
    ) -> None:
        """`peer` dialled a raw stream; the handler owns the blocking socket."""

    def mismatch(self, error: CollectiveMismatch) -> None:
        """Ranks called different collectives at one place."""
