"""Layout of one rank's snapshot in shared memory: header page, bulk bytes, description.

Decides where things lie and how a reader sees that it has read one image and not two halves. The
worker writes, its agent and whoever the agent serves read; the agent writes exactly one word, the
hold, with which it says whether the worker may use this memory for another snapshot.

Header fields are 8-byte words in native order. The sequence is odd while the image is written, so a
reader that sees the same even number before and after has read one image.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from trainmover.errors import StateMismatch
from trainmover.protocol.carried import Version

MAGIC: Final = 0x7472_6D76_736E_0001
HEADER_BYTES: Final = 4096
ALIGNMENT: Final = 64
"""Of each entry: no dtype needs more."""

FREE: Final = 0
"""Hold: the worker may write here."""
OLDEST: Final = 1
"""Hold: perhaps the only version that all ranks have; never to be overwritten."""
WAITING: Final = 2
"""Hold: not known to be complete everywhere; may be given up when that takes too long."""
WRITING: Final = 3
"""Hold: being written to durable storage."""

DIGEST_MASK: Final = (1 << 63) - 1

_MAGIC, _SEQUENCE, _HOLD, _TOTAL, _DESCRIPTION_AT, _DESCRIPTION_BYTES, _DESCRIPTION_DIGEST = range(
    7
)
_WORDS: Final = 8


class ImageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One local tensor of a rank's bulk state; checkpoints describe it in the same words."""

    name: str
    """Unique on its rank: `model.layers.0.weight`, `optimizer.state[model.weight].exp_avg`."""
    kind: str
    """`parameter`, `buffer`, `optimizer` or `object`."""
    dtype: str
    """torch's name without the prefix: `bfloat16`."""
    shape: tuple[int, ...]
    """Local shape."""
    offset: int
    """From the start of the bulk bytes."""
    size_bytes: int
    global_shape: tuple[int, ...]
    """Shape of the whole tensor; equal to `shape` where it is not sharded."""
    global_offset: tuple[int, ...]
    """Where the local part begins in the whole tensor; zeros where it is not sharded."""
    is_sharded: bool = False


class ImageDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one rank at one boundary but the bulk bytes."""

    rank: int
    world_size: int
    version: Version
    generation: int
    identity: str
    run_id: str
    bulk_bytes: int
    """Of the bulk area, gaps included."""
    entries: tuple[ImageEntry, ...]
    personal: bytes
    """Random generators, loader positions, own leaves; opaque here."""
    shared: bytes
    """Small leaves that are equal on all ranks, names of the own ones, manifest; opaque here."""
    loss: tuple[tuple[str, str], ...] = ()
    is_suspect: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ImageDescription)


def encode_description(description: ImageDescription) -> bytes:
    """Bytes for the end of the image, or for the wire."""
    return _encoder.encode(description)


def decode_description(data: bytes | memoryview) -> ImageDescription:
    """Raises StateMismatch."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        text = f"the description of a snapshot can't be read ({len(data)} bytes): {error}"
        raise StateMismatch(text) from error


def aligned(size: int) -> int:
    """The next place where an entry may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SnapshotImage:
    """View of one memory; writer's and reader's side are the same class."""

    def __init__(self, buffer: mmap.mmap | bytearray | memoryview) -> None:
        self.memory = memoryview(buffer)
        self._words = self.memory[: 8 * _WORDS].cast("Q")

    # ------------------------------------------------------------------ writing

    def begin(self) -> None:
        """From now on readers see that this image is not whole."""
        self._words[_MAGIC] = MAGIC
        if self._words[_SEQUENCE] % 2 == 0:
            self._words[_SEQUENCE] += 1

    def finish(self, description: bytes, bulk_bytes: int) -> int:
        """Put the description behind the bulk bytes; the image is whole. Its size."""
        place = HEADER_BYTES + aligned(bulk_bytes)
        total = place + len(description)
        self.memory[place:total] = description
        self._words[_TOTAL] = total
        self._words[_DESCRIPTION_AT] = place
        self._words[_DESCRIPTION_BYTES] = len(description)
        self._words[_DESCRIPTION_DIGEST] = _digest(description)
        self._words[_SEQUENCE] += 1
        return total

    @property
    def hold(self) -> int:
        """Whether, and why, the agent needs this image."""
        return self._words[_HOLD]

    def set_hold(self, hold: int) -> None:
        """Agent: say so."""
        self._words[_HOLD] = hold

    # ------------------------------------------------------------------ reading

    @property
    def sequence(self) -> int:
        """Odd while the image is written; another even number is another image."""
        return self._words[_SEQUENCE]

    @property
    def is_whole(self) -> bool:
        """Whether an image is here and nobody writes it."""
        return self._words[_MAGIC] == MAGIC and self.sequence % 2 == 0 and self.sequence > 0

    @property
    def total_bytes(self) -> int:
        """Of header, bulk and description."""
        return self._words[_TOTAL]

    def bulk(self, bulk_bytes: int) -> memoryview:
        """The bulk area."""
        return self.memory[HEADER_BYTES : HEADER_BYTES + bulk_bytes]

    def read_description(self) -> ImageDescription:
        """Raises StateMismatch where there is none, or not a whole one."""
        if not self.is_whole:
            raise StateMismatch("no whole snapshot is in this memory")
        start, size = self._words[_DESCRIPTION_AT], self._words[_DESCRIPTION_BYTES]
        data = bytes(self.memory[start : start + size])
        if len(data) != size or _digest(data) != self._words[_DESCRIPTION_DIGEST]:
            raise StateMismatch("the description of a snapshot is damaged")
        return decode_description(data)


def bulk_digest(bulk: memoryview, entries: Sequence[ImageEntry]) -> int:
    """63 bits; equal to the digest that `state.Inventory` computes of the same tensors."""
    lines = [
        f"{entry.name}={_digest(bulk[entry.offset : entry.offset + entry.size_bytes]):x}"
        for entry in entries
    ]
    return _digest("\n".join(lines).encode())


def _digest(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data) & DIGEST_MASK
