"""Random generators of a rank: Python, NumPy, torch CPU and the current accelerator.

Decides what counts as the global random state. Generators that the script made itself belong to
whoever holds them: a loader's are in its position, others can be tracked as objects.

An accelerator's generator is that of the *current* device, so a joiner with another device index
takes it over; it is included only once the accelerator has been initialised.
"""

from __future__ import annotations

import functools
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import torch
import xxhash

from trainmover.errors import StateMismatch
from trainmover.state.codec import decode_plain, encode_plain
from trainmover.state.generator_memory import Remembered, numpy_memory, python_memory
from trainmover.state.tensors import bytes_digest

_PYTHON: Final = struct.Struct("<B625Id?")
_NUMPY: Final = struct.Struct("<I?d")
_ACCELERATORS: Final = tuple(
    kind
    for kind, is_built in (
        ("cuda", torch.backends.cuda.is_built() or torch.version.hip is not None),
        ("xpu", torch.xpu._is_compiled()),
    )
    if is_built
)
"""Those that this build of torch can have at all."""


class RngState(msgspec.Struct, frozen=True, array_like=True):
    """States of the global generators, by library."""

    python: bytes
    numpy: bytes
    torch: bytes
    accelerators: dict[str, bytes] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RngState)


class _Newest:
    """The newest capture: most instants of a step have the state of the one before."""

    capture: tuple[RngState | None, bytes] = (None, b"")


_newest: Final = _Newest()


def capture_rng() -> bytes:
    """State of every global generator of this process; equal bytes mean equal state."""
    accelerators = {}
    for kind in _ACCELERATORS:
        module = getattr(torch, kind)
        if module.is_initialized():
            accelerators[kind] = module.get_rng_state().numpy().tobytes()
    state = RngState(_python()(), _numpy(), _torch(), accelerators)
    known, data = _newest.capture
    if state != known:
        data = _encoder.encode(state)
        _newest.capture = (state, data)
    return data


def capture_host_rng() -> bytes:
    """Like `capture_rng` without accelerators; what reading data can draw from."""
    return _encoder.encode(RngState(_python()(), _numpy(), _torch()))


def restore_rng(data: bytes) -> None:
    """Put captured generator states back; generators not in `data` stay as they are.

    Raises:
        StateMismatch: The bytes are not a capture, or from another version of a library.
    """
    state = _read(data)
    version, *ints, gauss, has_gauss = _PYTHON.unpack(state.python)
    random.setstate((version, tuple(ints), gauss if has_gauss else None))
    _restore_numpy(state.numpy)
    torch.set_rng_state(_byte_tensor(state.torch))
    for kind, raw in state.accelerators.items():
        module = getattr(torch, kind)
        if not module.is_available():
            raise StateMismatch(f"the random state has a {kind} generator, this machine has none")
        module.set_rng_state(_byte_tensor(raw))


def continue_rng(streams: Sequence[bytes], rank: int, world_size: int) -> bool:
    """Put the global generators where they follow from those of another number of ranks.

    Generators that were equal on all ranks stay so (ranks that hold parts of one model need that);
    else every rank gets new ones, seeded from all of theirs: the same at each such start.

    Args:
        streams: Captured states, by rank there.
        rank: This one.
        world_size: Number of ranks here.
    Returns:
        Whether the generators simply go on.
    """
    if len(set(streams)) == 1 and len(streams) > 1:
        restore_rng(streams[0])
        return True
    digest = xxhash.xxh3_64(f"{rank} of {world_size}".encode())
    for stream in streams:
        digest.update(stream)
    seed = digest.intdigest() >> 1
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed & ((1 << 32) - 1))
    return False


def rng_digest() -> int:
    """63-bit digest of the global generators."""
    return bytes_digest(capture_rng())


def differing_generators(before: bytes, after: bytes) -> tuple[str, ...]:
    """Names of the generators that differ between two captures: python, numpy, torch, cuda, …"""
    first, second = _read(before), _read(after)
    names = [
        name
        for name in ("python", "numpy", "torch")
        if getattr(first, name) != getattr(second, name)
    ]
    kinds = sorted({*first.accelerators, *second.accelerators})
    names += [
        kind for kind in kinds if first.accelerators.get(kind) != second.accelerators.get(kind)
    ]
    return tuple(names)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever the block draws, afterwards the global generators are as they were."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def _read(data: bytes) -> RngState:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as problem:
        raise StateMismatch(f"bytes of a random state can't be decoded: {problem}") from problem


@functools.cache
def _python() -> Remembered:
    generator = getattr(random.getstate, "__self__", None)
    return Remembered(_read_python, python_memory(generator))


def _read_python() -> bytes:
    version, ints, gauss = random.getstate()
    return _PYTHON.pack(version, *ints, 0.0 if gauss is None else gauss, gauss is not None)


def _numpy() -> bytes:
    return _imported_numpy()() if "numpy.random" in sys.modules else b""


@functools.cache
def _imported_numpy() -> Remembered:
    generator = getattr(np.random.get_state, "__self__", None)
    return Remembered(_read_numpy, numpy_memory(generator))


def _read_numpy() -> bytes:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        packed: bytes = inner["key"].tobytes()
        gauss = _NUMPY.pack(inner["pos"], bool(state["has_gauss"]), state["gauss"])
        return b"M" + gauss + packed
    return b"P" + encode_plain(state, "numpy.random.get_state()")


def _restore_numpy(data: bytes) -> None:
    if not data:
        return
    if data[:1] == b"P":
        np.random.set_state(decode_plain(data[1:]))
        return
    position, has_gauss, gauss = _NUMPY.unpack_from(data, 1)
    key = np.frombuffer(data, dtype=np.uint32, offset=1 + _NUMPY.size)
    np.random.set_state(("MT19937", key, position, int(has_gauss), gauss))


def _torch() -> bytes:
    raw: bytes = torch.get_rng_state().numpy().tobytes()
    return raw


def _byte_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
