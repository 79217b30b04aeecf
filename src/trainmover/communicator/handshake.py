"""How two processes prove to each other that they belong to one job, one generation.

Keyed-BLAKE2b challenge and response: neither side sends the secret, both prove it, and the
proofs bind job, generation, both incarnations and the purpose, so that none can be replayed
for another connection. Pure: bytes in, bytes out.

    dialler -> Hello, acceptor -> Challenge, dialler -> Proof, acceptor -> Welcome | Refusal
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

import msgspec

from trainmover.errors import RemoteProtocolError

PURPOSE_CHANNEL: Final = "channel"
PURPOSE_KNOCK: Final = "knock"
"""The higher rank asks the lower one to connect: only the lower rank ever opens a channel."""

LENGTH: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 4096
NONCE_BYTES: Final = 16


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who dials whom, for what."""

    job: str
    generation: int
    dialler: str
    acceptor: str
    machine: str
    purpose: str
    nonce: bytes
    ring: str
    """Shared-memory offer of the dialler (a path only its own machine can open), or empty."""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The acceptor's nonce and proof."""

    nonce: bytes
    proof: bytes
    ring: str


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The dialler's proof."""

    proof: bytes
    has_ring: bool
    """The acceptor's offer was taken."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connection is open."""

    has_ring: bool


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connection is closed, and why."""

    code: str
    """``generation``, ``identity``, ``secret`` or ``busy``."""
    reason: str


Message = Hello | Challenge | Proof | Welcome | Refusal

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Length-prefixed bytes of `message`."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Inverse of `encode`, without the length."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"malformed handshake: {error}") from error


def body_length(prefix: bytes) -> int:
    """Length announced by a prefix; refuses what no handshake needs."""
    (length,) = LENGTH.unpack(prefix)
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"handshake message of {length} bytes; the peer is not ours")
    return int(length)


def prove(secret: bytes, role: str, hello: Hello, nonce: bytes) -> bytes:
    """MAC of `role` (``dialler`` or ``acceptor``) over the whole handshake."""
    mac = hashlib.blake2b(key=hashlib.blake2b(secret).digest()[:64], digest_size=32)
    parts = (
        role.encode(),
        hello.job.encode(),
        str(hello.generation).encode(),
        hello.dialler.encode(),
        hello.acceptor.encode(),
        hello.machine.encode(),
        hello.purpose.encode(),
        hello.ring.encode(),
        hello.nonce,
        nonce,
    )
    for part in parts:
        mac.update(LENGTH.pack(len(part)))
        mac.update(part)
    return mac.digest()


def is_proof(expected: bytes, seen: bytes) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(expected, seen)
