"""Authentication of the link: who may speak, and that nothing was changed, repeated or left out.

Both ends know the job's token and prove it with keyed BLAKE2b over both ends' nonces; the token
itself never travels. Each message then carries a sequence number and a keyed digest of direction,
number and content under a key of this connection only. Nothing is encrypted: what travels here are
names and numbers of a training job, never its data.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

from trainmover.errors import ConfigError, RemoteProtocolError

NONCE_BYTES: Final = 16
DIGEST_BYTES: Final = 16
SEQUENCE_BYTES: Final = 8
OVERHEAD_BYTES: Final = SEQUENCE_BYTES + DIGEST_BYTES
TOKEN_VARIABLE: Final = "TRAINMOVER_TOKEN"
MIN_TOKEN_LENGTH: Final = 16


def new_token() -> str:
    """A token nobody can guess."""
    return secrets.token_hex(24)


def new_nonce() -> bytes:
    """A number used once."""
    return secrets.token_bytes(NONCE_BYTES)


def write_token(path: Path, token: str) -> None:
    """Write `token` where only this user can read it; whoever reads at that moment finds one whole.

    Agents of several machines may share a run directory and start together, and a controller that
    is killed here is started again.
    """
    made = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def read_token(path: Path) -> str:
    """The token in `path`. Raises ConfigError saying what is wrong with the file."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job's token can't be read from {path}: {error}") from error
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"expected a token of at least {MIN_TOKEN_LENGTH} characters in {path}, "
            f"found {len(token)}"
        )
    return token


def derive(token: str, purpose: str, *parts: bytes) -> bytes:
    """A 32-byte key for one purpose and one connection; no key says anything about another."""
    digest = hashlib.blake2b(key=token.encode("ascii")[:64], digest_size=32)
    digest.update(purpose.encode("ascii"))
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def channel_secret(token: str, run_id: str) -> bytes:
    """What workers prove to each other when they open channels."""
    return derive(token, "channels", run_id.encode())


def proof(key: bytes, *parts: bytes) -> bytes:
    """Keyed digest over `parts`, each with its length: what only a holder of `key` can say."""
    digest = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def is_equal(left: bytes, right: bytes) -> bool:
    """Comparison whose time says nothing about where the difference is."""
    return hmac.compare_digest(left, right)


class Seal:
    """One end of an authenticated connection."""

    def __init__(self, key: bytes, *, sends_as: str, receives_from: str) -> None:
        self._key = key
        self._sends_as = sends_as.encode("ascii")
        self._receives_from = receives_from.encode("ascii")
        self._sent = 0
        self._received = 0

    def close(self, payload: bytes) -> bytes:
        """`payload` ready to be sent."""
        self._sent += 1
        number = self._sent.to_bytes(SEQUENCE_BYTES, "big")
        return number + self._digest(self._sends_as, number, payload) + payload

    def open(self, data: bytes) -> bytes:
        """The payload of a received message. Raises RemoteProtocolError."""
        number = data[:SEQUENCE_BYTES]
        digest = data[SEQUENCE_BYTES:OVERHEAD_BYTES]
        payload = data[OVERHEAD_BYTES:]
        if not is_equal(digest, self._digest(self._receives_from, number, payload)):
            raise RemoteProtocolError("a message's digest does not fit the job's token")
        if int.from_bytes(number, "big") != self._received + 1:
            expected, got = self._received + 1, int.from_bytes(number, "big")
            raise RemoteProtocolError(f"expected message {expected} of the link, got {got}")
        self._received += 1
        return payload

    def _digest(self, direction: bytes, number: bytes, payload: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES)
        digest.update(direction)
        digest.update(number)
        digest.update(payload)
        return digest.digest()
