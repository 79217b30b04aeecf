"""Reading from a blocking stream between two workers: whole lengths, whole blocks, or an error."""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

from trainmover.errors import TransportError

LENGTH: Final = struct.Struct("!Q")


def exactly(stream: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises TransportError."""
    data = bytearray()
    while len(data) < count:
        try:
            part: Any = stream.recv(min(1 << 20, count - len(data)))
        except OSError as error:
            raise TransportError(
                f"stream ended after {len(data)} of {count} bytes: {error}"
            ) from error
        if not part:
            raise TransportError(f"stream ended after {len(data)} of {count} bytes")
        data += part
    return bytes(data)
