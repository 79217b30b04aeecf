"""What the runtime hands over: one rank's state at one boundary, as bytes with a description.

Decides the words only. The image itself is a memory of the caller's, read and never copied whole.
"""

from __future__ import annotations

import msgspec

from trainmover.protocol.snapshot_image import ImageEntry


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one rank when it enters step `step`, but for the bytes of the image."""

    rank: int
    world_size: int
    step: int
    lineage: int
    """Generation in which the gate of the step before passed: (step, lineage) is a version."""
    generation: int
    identity: str
    """Equal on two ranks if and only if their bulk states are replicas of each other."""
    entries: tuple[ImageEntry, ...]
    personal: bytes
    """Opaque here: RNG, loader positions, own leaves."""
    shared: bytes
    """Opaque here: small leaves that are equal on all ranks."""
    bulk_digest: int
    """As `state/inventory` computes it, 63 bits."""
    run_id: str
    loss: tuple[tuple[str, str], ...] = ()
    """Names and `float.hex` of the last committed step's logged values."""
    is_suspect: bool = False
    """The state may be poisoned (non-finite or stuck loss): never the latest by itself."""

    @property
    def image_bytes(self) -> int:
        """Bytes of all entries, without gaps."""
        return sum(entry.size_bytes for entry in self.entries)
