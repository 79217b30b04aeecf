"""An agent's answers about its machine's own disk: what is there, its bytes, if they are whole.

Decides how requests and answers follow each other. What may be read is decided by `OwnDisks`, which
knows the checkpoints; bytes are compared with their checksums where they lie.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from trainmover.edges.snapshot_wire import (
    BytesFollow,
    CheckFiles,
    CheckpointOnDisk,
    DiskSeen,
    Enough,
    FilesChecked,
    LookAtDisk,
    ReadFile,
    Refusal,
    StillChecking,
    Wire,
    WireMessage,
)
from trainmover.errors import CheckpointError, ConfigError, RemoteProtocolError, TransportError

READ_LIMIT_BYTES: Final = 16 << 20
"""Most bytes of one answer."""
SIGN_INTERVAL_S: Final = 1.0
"""Between signs of a check that takes long."""


class OwnDisks(Protocol):
    """Checkpoints on this machine's own disk. Methods raise CheckpointError, ConfigError."""

    def look(self) -> tuple[CheckpointOnDisk, ...]:
        """Everything that is there."""

    def read(self, request: ReadFile, into: memoryview) -> int:
        """Fill `into`; the count of bytes, smaller at the end of the file."""

    def check(
        self, request: CheckFiles, moved: Callable[[int], None]
    ) -> tuple[tuple[str, str], ...]:
        """Files that differ from their checksums; `moved` is told of progress."""


def answer_about_disks(wire: Wire, message: WireMessage, disks: OwnDisks) -> None:
    """This request and all that follow on the connection."""
    while not isinstance(message, Enough):
        try:
            _answer(wire, message, disks)
        except (CheckpointError, ConfigError) as error:
            wire.send(Refusal(reason=str(error)))
        try:
            message = wire.receive_any()
        except TransportError:
            return  # whoever asked has what it wanted, or is gone


def _answer(wire: Wire, message: WireMessage, disks: OwnDisks) -> None:
    match message:
        case LookAtDisk():
            wire.send(DiskSeen(found=disks.look()))
        case ReadFile():
            if not 0 <= message.count <= READ_LIMIT_BYTES or message.position < 0:
                raise RemoteProtocolError(f"{message.count} bytes of a file were asked for at once")
            data = memoryview(bytearray(message.count))
            count = disks.read(message, data)
            wire.send(BytesFollow(count=count))
            wire.send_bytes(data[:count])
        case CheckFiles():
            damages = disks.check(message, _signs(wire))
            wire.send(FilesChecked(damages=damages))
        case _:
            raise RemoteProtocolError(f"{type(message).__name__} is no request about a disk")


def _signs(wire: Wire) -> Callable[[int], None]:
    """Tells whoever waits that the check goes on."""
    told_at, waiting = time.monotonic(), 0

    def moved(byte_count: int) -> None:
        nonlocal told_at, waiting
        waiting += byte_count
        if time.monotonic() - told_at >= SIGN_INTERVAL_S:
            wire.send(StillChecking(byte_count=waiting))
            told_at, waiting = time.monotonic(), 0

    return moved
