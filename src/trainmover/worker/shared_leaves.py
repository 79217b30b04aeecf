"""Small leaves that all ranks have alike, as they travel to a joiner."""

from __future__ import annotations

import msgspec

from trainmover.errors import StateMismatch

Smalls = tuple[tuple[str, bytes], ...]
"""Names and opaque bytes of the state room."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Smalls)


def encode_smalls(smalls: Smalls) -> bytes:
    """Bytes for a stream."""
    return _encoder.encode(smalls)


def decode_smalls(data: bytes) -> Smalls:
    """Raises StateMismatch."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StateMismatch(f"shared leaves can't be read ({len(data)} bytes): {error}") from error
