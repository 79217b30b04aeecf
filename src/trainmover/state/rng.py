"""Random generators of a rank: Python, NumPy, torch CPU and the current accelerator.

Decides what counts as the global random state. Generators that the script made itself belong to
whoever holds them: a loader's are in its position, others can be tracked as objects.

An accelerator's generator is that of the *current* device, so a joiner with another device index
takes it over; it is included only once the accelerator has been initialised.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import torch

from trainmover.errors import StateMismatch
from trainmover.state.codec import decode_plain, encode_plain
from trainmover.state.tensors import bytes_digest

_PYTHON: Final = struct.Struct("<B625Id?")
_NUMPY: Final = struct.Struct("<I?d")
_ACCELERATORS: Final = ("cuda", "xpu")


class RngState(msgspec.Struct, frozen=True, array_like=True):
    """States of the global generators, by library."""

    python: bytes
    numpy: bytes
    torch: bytes
    accelerators: dict[str, bytes] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RngState)


def capture_rng() -> bytes:
    """State of every global generator of this process; equal bytes mean equal state."""
    accelerators = {}
    for kind in _ACCELERATORS:
        module = getattr(torch, kind)
        if module.is_initialized():
            accelerators[kind] = module.get_rng_state().numpy().tobytes()
    return _encoder.encode(RngState(_python(), _numpy(), _torch(), accelerators))


def capture_host_rng() -> bytes:
    """Like `capture_rng` without accelerators; what reading data can draw from."""
    return _encoder.encode(RngState(_python(), _numpy(), _torch()))


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


def _python() -> bytes:
    version, ints, gauss = random.getstate()
    return _PYTHON.pack(version, *ints, 0.0 if gauss is None else gauss, gauss is not None)


def _numpy() -> bytes:
    if "numpy.random" not in sys.modules:
        return b""
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
