"""Increments as control frames: in pieces, cut short, more than announced, taken back."""

from __future__ import annotations

from typing import Any

import pytest

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.messages import Version
from trainmover.state.increment import IncrementHead, encode_head
from trainmover.topology.keeping import SnapshotConfig
from trainmover.worker.increment_side import IncrementSide
from trainmover.worker.personal import INCREMENT, INCREMENT_BYTES

OWNER = 2
BYTES = b"0123456789"
NOBODY: Any = None
"""Holding needs no process around it."""


def side() -> IncrementSide:
    return IncrementSide(NOBODY, SnapshotConfig(increments="auto"))


def head(step: int, **changes: Any) -> bytes:
    known: dict[str, Any] = {"owner_rank": OWNER, "bulk_bytes": len(BYTES)}
    at, behind = Version(step=step, lineage=1), Version(step=step + 1, lineage=1)
    return encode_head(IncrementHead(base=at, version=behind, **(known | changes)))


def held(holder: IncrementSide) -> list[tuple[int, bytes]]:
    return [(each.base.step, bytes(each.bulk)) for each in holder.store.line(OWNER)]


def test_pieces_make_a_whole() -> None:
    holder = side()
    holder.arrived(OWNER, INCREMENT, 1, head(4))
    holder.arrived(OWNER, INCREMENT_BYTES, 1, BYTES[:3])
    assert held(holder) == []
    holder.arrived(OWNER, INCREMENT_BYTES, 1, BYTES[3:])
    holder.arrived(OWNER, INCREMENT, 1, head(5, bulk_bytes=0))
    assert held(holder) == [(4, BYTES), (5, b"")]


def test_one_that_is_cut_short_with_its_generation_is_never_held() -> None:
    holder = side()
    holder.arrived(OWNER, INCREMENT, 1, head(4))
    holder.arrived(OWNER, INCREMENT_BYTES, 1, BYTES[:3])
    holder.arrived(OWNER, INCREMENT_BYTES, 2, BYTES[3:])
    assert held(holder) == []
    holder.arrived(OWNER, INCREMENT, 2, head(4))
    holder.arrived(OWNER, INCREMENT_BYTES, 2, BYTES)
    assert held(holder) == [(4, BYTES)]


def test_nonsense_is_refused_by_name() -> None:
    holder = side()
    with pytest.raises(RemoteProtocolError, match="impossible"):
        holder.arrived(OWNER + 1, INCREMENT, 1, head(4))
    with pytest.raises(RemoteProtocolError, match="impossible"):
        holder.arrived(OWNER, INCREMENT, 1, head(4, bulk_bytes=-1))
    with pytest.raises(RemoteProtocolError, match="head"):
        holder.arrived(OWNER, INCREMENT, 1, b"\xc1")
    holder.arrived(OWNER, INCREMENT, 1, head(4))
    with pytest.raises(RemoteProtocolError, match="more"):
        holder.arrived(OWNER, INCREMENT_BYTES, 1, BYTES * 2)


def test_what_was_taken_back_is_not_held() -> None:
    holder = side()
    holder.arrived(OWNER, INCREMENT, 1, head(4))
    holder.arrived(OWNER, INCREMENT_BYTES, 1, BYTES)
    holder.arrived(OWNER, INCREMENT, 1, head(-1, bulk_bytes=0, is_void=True))
    assert held(holder) == []
