"""The safetensors layout: eight bytes of header length, a JSON header, the tensors' bytes.

Decides how a rank's entries become a file that stock tools open (decision 0006). What safetensors
has no word for stands in its `__metadata__`: kind, place in the whole tensor, checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trainmover.errors import LayoutMismatch, ShardCorrupt

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""The stock reader's own limit."""
METADATA: Final = "__metadata__"
OURS: Final = "trainmover"
FORMAT: Final = 1

DTYPES: Final[dict[str, tuple[str, int]]] = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    # No word in safetensors: a last dimension of two takes the real and the imaginary part.
    "complex128": ("F64", 16),
}
"""torch's name: safetensors' name and bytes per element."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one entry, or the whole of it, as they stand in one file."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    """Of this piece."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Of this piece in the whole tensor."""
    is_sharded: bool
    begin: int
    """First byte of this piece in the rank's entry; not 0 where the entry was split."""
    size_bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPiece:
    """A piece and where its bytes are."""

    piece: Piece
    position: int
    """First byte in the file."""


def element_bytes(dtype: str, name: str) -> int:
    """Bytes of one element. Raises LayoutMismatch, naming the entry, for a dtype without a form."""
    found = DTYPES.get(dtype)
    if found is None:
        known = ", ".join(sorted(DTYPES))
        raise LayoutMismatch(f"{name} is {dtype}, which safetensors can't hold; it holds {known}")
    return found[1]


def in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Widest elements first, so that every tensor is aligned without gaps."""
    return sorted(pieces, key=lambda piece: -element_bytes(piece.dtype, piece.name))


def make_header(pieces: Sequence[Piece], facts: dict[str, str]) -> bytes:
    """Length and header of a file in which `pieces` follow each other in this order."""
    tensors: dict[str, Any] = {}
    position = 0
    for piece in pieces:
        shape = [*piece.shape, 2] if piece.dtype == "complex128" else list(piece.shape)
        end = position + piece.size_bytes
        tensors[piece.name] = {
            "dtype": DTYPES[piece.dtype][0],
            "shape": shape,
            "data_offsets": [position, end],
        }
        position = end
    own = msgspec.json.encode({"format": FORMAT, "pieces": list(pieces)}).decode()
    metadata = {"format": "pt", **facts, OURS: own}
    header = msgspec.json.encode({METADATA: metadata, **tensors})
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise LayoutMismatch(
            f"{len(pieces)} entries need a header of {len(header)} bytes, safetensors allows "
            f"{MAX_HEADER_BYTES}; lower the split size so that each file holds fewer"
        )
    return struct.pack("<Q", len(header)) + header


class _Own(msgspec.Struct):
    format: int
    pieces: tuple[Piece, ...]


def header_length(first: bytes, file: str) -> int:
    """Bytes of the header, from a file's first eight. Raises ShardCorrupt."""
    if len(first) != LENGTH_BYTES:
        raise ShardCorrupt(f"{file}: {len(first)} bytes where a header length of 8 was expected")
    length: int = struct.unpack("<Q", first)[0]
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ShardCorrupt(f"{file}: a header of {length} bytes can't be")
    return length


def parse_header(header: bytes, file: str) -> list[PlacedPiece]:
    """The pieces of a file with their places. Raises ShardCorrupt, naming `file`."""
    try:
        document = msgspec.json.decode(header)
        own = msgspec.json.decode(document[METADATA][OURS], type=_Own)
        starts = {
            name: int(tensor["data_offsets"][0])
            for name, tensor in document.items()
            if name != METADATA
        }
        first = LENGTH_BYTES + len(header)
        return [PlacedPiece(piece=p, position=first + starts[p.name]) for p in own.pieces]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, IndexError) as error:
        text = f"{file}: not a safetensors header of ours: {type(error).__name__} {error}"
        raise ShardCorrupt(text) from error
