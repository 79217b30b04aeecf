"""A recording: collectives of a role's first iterations, with what came back. And its file.

Decides the format: a length, a JSON header (calls, places, checksums) and the bytes. It is written
beside its name and renamed, never half there; it is never unpickled; every value is checked when
it is used.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import xxhash

from trainmover.errors import RecordingError
from trainmover.rehearsal.calls import CallShape

MAGIC = b"TMREC001"
LENGTH = struct.Struct("<Q")
ALIGNMENT = 64
SUFFIX = ".recording"


class Value(msgspec.Struct, frozen=True):
    """Where one tensor lies behind the header."""

    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    checksum: str


class Entry(msgspec.Struct, frozen=True):
    """One call; `values` is None where nothing was kept."""

    shape: CallShape
    place: str
    """File and line of the call in the script."""
    values: tuple[Value, ...] | None = None


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """All of a recording but its bytes."""

    fingerprint: str
    role_class: str
    state: str
    """Digest of the shapes of the role's state."""
    ranks: tuple[int, ...]
    torch: str
    iterations: tuple[tuple[Entry, ...], ...]

    @property
    def value_bytes(self) -> int:
        """Bytes of everything kept."""
        return sum(
            value.bytes
            for entries in self.iterations
            for entry in entries
            for value in entry.values or ()
        )


class Recording:
    """A recording read from its file."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises RecordingError naming the file and what is wrong."""
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(f"the recording {path} can't be read: {error}") from error
        try:
            self.header, self._start = _read_header(self._file, path)
        except RecordingError:
            self._file.close()
            raise

    def tensors(self, entry: Entry) -> list[torch.Tensor]:
        """Values of `entry`, checked. Raises RecordingError."""
        return [self._tensor(value) for value in entry.values or ()]

    def _tensor(self, value: Value) -> torch.Tensor:
        # Read and not mapped: pages of a mapped file would count as this process's memory.
        begin = self._start + value.offset
        data = bytearray(value.bytes)
        _fill(memoryview(data), self._file.fileno(), begin)
        if xxhash.xxh3_64(data).hexdigest() != value.checksum:
            raise RecordingError(
                f"{self.path} is damaged at byte {begin}: expected checksum {value.checksum}; "
                "delete it, the next run records anew"
            )
        dtype = getattr(torch, value.dtype)
        if not data:
            return torch.empty(value.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(value.shape)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _fill(target: memoryview, fd: int, at: int) -> None:
    """From any thread. A file that is too short leaves zeros, which no checksum lets pass."""
    while target and (count := os.preadv(fd, [target], at)):
        target, at = target[count:], at + count


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    prefix = len(MAGIC) + LENGTH.size
    head = file.read(prefix)
    if not head.startswith(MAGIC) or len(head) < prefix:
        raise RecordingError(f"{path} is no recording of this version")
    (length,) = LENGTH.unpack(head[len(MAGIC) :])
    # A damaged length must not ask for more than there is.
    text = file.read(min(length, os.fstat(file.fileno()).st_size))
    checksum = file.read(16)
    if len(text) != length or xxhash.xxh3_64(text).hexdigest().encode() != checksum:
        raise RecordingError(f"the header of {path} is damaged; delete it, it is recorded anew")
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError as error:
        raise RecordingError(f"the header of {path} can't be decoded: {error}") from error
    return header, _aligned(prefix + length + 16)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Draft:
    """A recording that is about to be written: values are tensors in memory."""

    def __init__(self, header: Header, tensors: Sequence[Sequence[list[torch.Tensor] | None]]):
        self._header = header
        self._tensors = tensors

    def write(self, path: Path) -> int:
        """Write the file as a whole or not at all; bytes of the values. Raises OSError."""
        header, blobs = self._laid_out()
        text = msgspec.json.encode(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + LENGTH.pack(len(text)) + text)
                file.write(xxhash.xxh3_64(text).hexdigest().encode())
                for blob in blobs:
                    file.write(b"\0" * (_aligned(file.tell()) - file.tell()))
                    file.write(blob)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        return header.value_bytes

    def _laid_out(self) -> tuple[Header, list[bytes]]:
        blobs: list[bytes] = []
        iterations = []
        offset = 0
        for entries, kept in zip(self._header.iterations, self._tensors, strict=True):
            laid = []
            for entry, tensors in zip(entries, kept, strict=True):
                values = None if tensors is None else _placed(tensors, offset, blobs)
                offset = values[-1].offset + values[-1].bytes if values else offset
                laid.append(msgspec.structs.replace(entry, values=values))
            iterations.append(tuple(laid))
        return msgspec.structs.replace(self._header, iterations=tuple(iterations)), blobs


def _placed(tensors: list[torch.Tensor], offset: int, blobs: list[bytes]) -> tuple[Value, ...]:
    """Places behind `offset`; the bytes go to `blobs`."""
    found = []
    for tensor in tensors:
        blob = as_bytes(tensor)
        found.append(_value(tensor, blob, _aligned(offset)))
        blobs.append(blob)
        offset = found[-1].offset + len(blob)
    return tuple(found)


def _value(tensor: torch.Tensor, blob: bytes, offset: int) -> Value:
    return Value(
        offset=offset,
        bytes=len(blob),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        checksum=xxhash.xxh3_64(blob).hexdigest(),
    )


class RecordingStore:
    """Recordings of one fingerprint in a directory that may outlive the job."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.folder = root / fingerprint

    def path(self, role_class: str) -> Path:
        """Where the recording of a class lies."""
        return self.folder / f"{role_class}{SUFFIX}"

    def of_rank(self, rank: int, state: str) -> Recording | None:
        """A recording of `rank`'s class that an earlier run left, if the state has its shapes."""
        if not self.folder.is_dir():
            return None
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                found = Recording(path)
            except RecordingError:
                continue  # damaged: it is recorded anew over the same name
            if rank in found.header.ranks and found.header.state == state:
                return found
            found.close()
        return None
