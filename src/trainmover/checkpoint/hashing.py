"""The one checksum of durable state: XXH3, 128 bits, as hex.

Decides the algorithm. It finds accidents (flipped bits, torn writes, swapped files), not forgers.
"""

from __future__ import annotations

from typing import Final

import xxhash

ALGORITHM: Final = "xxh3-128"
HEX_LENGTH: Final = 32

Hasher = xxhash.xxh3_128


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Checksum of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def is_checksum(text: str) -> bool:
    """True for something that `checksum` can have returned; an absent checksum is none."""
    return len(text) == HEX_LENGTH and all(c in "0123456789abcdef" for c in text)
