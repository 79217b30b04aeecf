"""A rank's personal state as it travels to its backups, and the store in which backups keep it.

Personal is what no other rank has: random generators, positions of loaders, small objects whose
value differs by rank. It rides in front of every gate to two peers (protocol.md W2, W3).
"""

from __future__ import annotations

import msgspec

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.messages import Held, Version

PERSONAL: int = 1
"""Kind of the control frame that carries personal state."""
INCREMENT: int = 2
"""Kind of the control frame that announces an increment; its bytes follow in others."""
INCREMENT_BYTES: int = 3

KEPT_VERSIONS = 4
"""Versions of one owner that are kept: it may be a gate ahead, and a plan may go one back."""


class Personal(msgspec.Struct, frozen=True, kw_only=True):
    """Own leaves of one rank for one version. Names and opaque bytes of the state room."""

    owner_rank: int
    version: Version
    is_final: bool
    """False: taken at the gate by a rank that is known to change own leaves after it."""
    rng: bytes
    batches: tuple[bytes, ...]
    smalls: tuple[tuple[str, bytes], ...] = ()
    step_index: int = 0
    """The script's step this version stands in front of."""
    parts_done: tuple[str, ...] = ()
    """Parts of that step (callable form) that are behind it already."""
    metrics: tuple[tuple[int, str, str, float], ...] = ()
    """Values that ride in front of the next gate: step, reduction, name, value."""
    logged: tuple[tuple[str, str], ...] = ()
    """What `step.log` recorded in front of the gate of step version.step - 1."""
    replicas: tuple[int, ...] = ()
    """Ranks whose bulk state is equal to this rank's; some of them where there are many."""
    is_whole: bool = False
    """All small objects, from behind the update: which of them are own is not known yet."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Personal)


def encode(personal: Personal) -> bytes:
    """Bytes for a control frame."""
    return _encoder.encode(personal)


def decode(data: bytes) -> Personal:
    """Raises RemoteProtocolError."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(
            f"expected personal state, got {len(data)} bytes: {error}"
        ) from error


class _Head(msgspec.Struct, frozen=True):
    """What a backup has to know of a `Personal` at once; the rest is read by who needs it."""

    owner_rank: int
    version: Version
    is_final: bool


_head_decoder = msgspec.msgpack.Decoder(_Head)


class BackupStore:
    """Personal states of this rank's wards, a few versions each. Only the I/O thread writes.

    Kept as they came: nearly all of them are never read, and to take each apart would cost every
    step more than to send it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Held, bytes]] = {}

    def put(self, data: bytes) -> Held:
        """Keep the newest copy of (owner, version); a gate copy never replaces a final one.

        Raises:
            RemoteProtocolError: This is no encoded personal state.
        """
        try:
            head = _head_decoder.decode(data)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(
                f"expected personal state, got {len(data)} bytes: {error}"
            ) from error
        key = (head.owner_rank, head.version.step)
        known = self._kept.get(key)
        if known is None or not known[0].is_final or head.is_final:
            held = Held(owner_rank=head.owner_rank, version=head.version, is_final=head.is_final)
            self._kept[key] = (held, data)
        self._drop_old(*key)
        return self._kept[key][0]

    def get(self, owner_rank: int, step: int) -> Personal | None:
        """Personal state of `owner_rank` for version `step`, if held."""
        kept = self._kept.get((owner_rank, step))
        return None if kept is None else decode(kept[1])

    def held(self) -> tuple[Held, ...]:
        """All that is held, by owner and version."""
        return tuple(held for _, (held, _) in sorted(self._kept.items()))

    def _drop_old(self, owner_rank: int, newest: int) -> None:
        for key in [k for k in self._kept if k[0] == owner_rank and k[1] <= newest - KEPT_VERSIONS]:
            del self._kept[key]

    def drop_above(self, step: int) -> None:
        """Forget versions above `step`: they belong to attempts that never were."""
        for key in [key for key in self._kept if key[1] > step]:
            del self._kept[key]
