"""What the runtime hands over: one rank's state at one boundary, as bytes with a description.

Decides the words only. The image itself is a memory of the caller's, read and never copied whole.
"""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One local tensor of a rank's bulk state."""

    name: str
    """Unique on its rank: `model.layers.0.weight`, `optimizer.state[model.weight].exp_avg`."""
    kind: str
    """`parameter`, `buffer`, `optimizer` or `object`."""
    dtype: str
    """torch's name without the prefix: `bfloat16`."""
    shape: tuple[int, ...]
    """Local shape."""
    offset: int
    """First byte in the image."""
    size_bytes: int
    global_shape: tuple[int, ...]
    """Shape of the whole tensor; equal to `shape` where it is not sharded."""
    global_offset: tuple[int, ...]
    """Where the local part begins in the whole tensor; zeros where it is not sharded."""
    is_sharded: bool = False


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
    entries: tuple[Entry, ...]
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
