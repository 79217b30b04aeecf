"""The list of a rank's bulk entries, as it crosses a process boundary.

Decides nothing; `inventory` makes and compares manifests.
"""

from __future__ import annotations

import msgspec


class StateEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One local tensor of the bulk state."""

    name: str
    """Unique in its manifest: `model.layers.0.weight`, `optimizer.state[model.weight].exp_avg`."""
    kind: str
    """`parameter`, `buffer`, `optimizer` or `object`."""
    shape: tuple[int, ...]
    """Local shape."""
    dtype: str
    """torch's name without the prefix: `bfloat16`."""
    device: str
    """Kind of device, without index."""
    offset: int
    """First byte in the stream of all entries."""
    size_bytes: int
    global_offset: tuple[int, ...] = ()
    """Where the local shard begins in the whole tensor; () for tensors that are not sharded."""
    is_sharded: bool = False
    """Whether the tensor is a DTensor."""


class StateManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All bulk entries of a rank in transfer order, and the names of its small leaves."""

    identity: str
    entries: tuple[StateEntry, ...]
    small_names: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.size_bytes for entry in self.entries)
