"""The bytes of a channel: one fixed header, a payload, a trailer behind data.

Decides the layout only. A receiver takes nothing of a data frame without the trailer OK: a
sender that is interrupted in the middle of one completes it with POISON, so that the stream
stays readable for the next generation (protocol.md, B10).
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Final, NamedTuple

from trainmover.errors import RemoteProtocolError

HEADER: Final = struct.Struct("<BBHIQQIIQQ")
HEADER_BYTES: Final = HEADER.size

TRAILER_OK: Final = b"\x4f"
TRAILER_POISON: Final = b"\x50"
MAX_FRAME_BYTES: Final = 1 << 30


class FrameType(enum.IntEnum):
    """What a frame carries."""

    DATA = 1
    """A piece of a collective or a send; has a trailer."""
    GATE = 2
    PERS = 3
    """A small message of the layer above."""
    POISON = 4
    MARK = 5
    ROOM = 6
    """Shared memory: space was freed, the blocked sender may go on."""
    ASK = 7
    """What are you doing? Data of yours is missing here."""
    ANSWER = 8


FLAG_IN_RING: Final = 1
"""The payload is in the shared-memory ring, not behind the header."""


class Header(NamedTuple):
    """A decoded header.

    `slot`, `tag` and `check` mean: for DATA the place in the schedule, 0 or the tag plus one of
    a send, and the packed call; for GATE round, step and kind; for PERS kind, step, unused; for
    ANSWER what the peer does (see overdue.py), unused, unused.
    """

    type: int
    flags: int
    reserved: int
    slot: int
    generation: int
    group: int
    sequence: int
    length: int
    tag: int
    check: int


def decode_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Header at `offset`; raises `RemoteProtocolError` for one no version of us sends."""
    header = Header._make(HEADER.unpack_from(buffer, offset))
    if not 1 <= header.type <= 8 or header.length > MAX_FRAME_BYTES:
        raise RemoteProtocolError(
            f"malformed frame: type {header.type}, {header.length} bytes; the stream is corrupt"
        )
    return header


def group_id(name: str) -> int:
    """64-bit id of a group, equal on every rank that names it equally."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


# -- packed description of a collective, to find and to name mismatches -------

_NUMEL_BITS: Final = 40


def pack_check(kind: int, dtype: int, op: int, numel: int) -> int:
    """Kind, dtype, op and number of elements of a call in 64 bits."""
    return (kind << 56) | (dtype << 48) | (op << _NUMEL_BITS) | (numel & ((1 << 40) - 1))


def unpack_check(check: int) -> tuple[int, int, int, int]:
    """(kind, dtype, op, numel) of a packed call."""
    return check >> 56, (check >> 48) & 255, (check >> 40) & 255, check & ((1 << 40) - 1)


# -- payloads of the small frames ---------------------------------------------


def pack_flags(flags: tuple[int, ...]) -> bytes:
    """Gate flags as signed 64-bit integers."""
    return struct.pack(f"<{len(flags)}q", *flags)


def unpack_flags(payload: bytes | memoryview) -> tuple[int, ...]:
    """Inverse of `pack_flags`."""
    return struct.unpack(f"<{len(payload) // 8}q", payload)


def pack_edges(edges: tuple[tuple[str, str], ...]) -> bytes:
    """Failed edges (pairs of incarnations) of a POISON frame."""
    parts = []
    for edge in edges:
        for name in edge:
            raw = name.encode()
            parts.append(struct.pack("<H", len(raw)) + raw)
    return b"".join(parts)


def unpack_edges(payload: bytes) -> tuple[tuple[str, str], ...]:
    """Inverse of `pack_edges`."""
    names: list[str] = []
    at = 0
    while at < len(payload):
        if at + 2 > len(payload):
            raise RemoteProtocolError("malformed POISON frame: cut short")
        (length,) = struct.unpack_from("<H", payload, at)
        names.append(payload[at + 2 : at + 2 + length].decode())
        at += 2 + length
    if at != len(payload) or len(names) % 2:
        raise RemoteProtocolError("malformed POISON frame: edges are pairs of names")
    return tuple(zip(names[::2], names[1::2], strict=True))
