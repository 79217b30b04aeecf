"""Plain data to bytes and back, exactly, without pickle.

Decides which values count as plain. Equal values give equal bytes, so digests of encoded leaves
can be compared between ranks. Types survive: a tuple stays a tuple, an int key an int key, a NaN
keeps its bits. Anything that would come back as something else is refused with its path; the only
exception is a `defaultdict` whose factory is not a builtin, which comes back as a dict.

Not for bulk: tensors are copied here. `transfer` moves those.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import torch

from trainmover.errors import StateMismatch, TrackError

_BIG_INT: Final = 1
_TUPLE: Final = 2
_SET: Final = 3
_FROZENSET: Final = 4
_MAP: Final = 5
_ORDERED: Final = 6
_COUNTER: Final = 7
_DEFAULT: Final = 8
_DEQUE: Final = 9
_TENSOR: Final = 10
_ARRAY: Final = 11
_SCALAR: Final = 12
_SIZE: Final = 13
_DTYPE: Final = 14
_DEVICE: Final = 15
_ENUM: Final = 16
_COMPLEX: Final = 17
_BYTEARRAY: Final = 18
_RANGE: Final = 19

_FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)
}
_encode = msgspec.msgpack.encode


class _NotPlainError(Exception):
    """Internal: carries the path from the root to the value that can't be encoded."""

    def __init__(self, value: object, why: str = "") -> None:
        super().__init__()
        self.value = value
        self.why = why
        self.path: list[str] = []


def encode_plain(value: object, name: str = "value") -> bytes:
    """Bytes of a plain value; deterministic.

    Args:
        value: Plain data, see the module header.
        name: What the value is called in error messages.
    Raises:
        TrackError: Something in `value` is not plain; the message names its path.
    """
    try:
        return _encode(_pack(value))
    except _NotPlainError as problem:
        where = name + "".join(reversed(problem.path))
        kind = type(problem.value)
        what = problem.why or f"is a {kind.__module__}.{kind.__qualname__}"
        raise TrackError(
            f"{where} {what}, which is not plain data and can't be captured. Keep numbers, "
            "strings, containers of those or tensors in it, or leave it out of state_dict()"
        ) from None
    except RecursionError:
        raise TrackError(f"{name} contains itself; it can't be captured") from None
    except UnicodeEncodeError as problem:
        raise TrackError(f"{name} holds text that is not valid Unicode: {problem}") from None


def decode_plain(data: bytes | bytearray | memoryview) -> Any:
    """The value that `encode_plain` was given.

    Raises:
        StateMismatch: The bytes are not an encoded value.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpack)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError) as problem:
        raise StateMismatch(f"bytes of a small leaf can't be decoded: {problem}") from problem


_AS_THEY_ARE: Final = frozenset((type(None), bool, float, str, bytes))
"""Most of what is in small leaves: spared a call each, since a step packs them several times."""


def _pack(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        if -(1 << 63) <= value < (1 << 64):
            return value
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(size, "little", signed=True))
    if kind is list:
        return _pack_items(value)
    if kind is dict:
        return _pack_dict(value)
    handler = _PACKERS.get(kind)
    if handler is None:
        handler = _inherited_packer(kind)
    if handler is None:
        raise _NotPlainError(value)
    code, payload = handler(value)
    return msgspec.msgpack.Ext(code, payload)


def _pack_items(items: Any) -> list[Any]:
    packed = []
    for index, item in enumerate(items):
        if type(item) in _AS_THEY_ARE:
            packed.append(item)
            continue
        try:
            packed.append(_pack(item))
        except _NotPlainError as problem:
            problem.path.append(f"[{index}]")
            raise
    return packed


def _pack_value_of(key: object, value: object) -> Any:
    try:
        return _pack(value)
    except _NotPlainError as problem:
        problem.path.append(f"[{key!r}]")
        raise


def _pack_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        return {
            key: item if type(item) in _AS_THEY_ARE else _pack_value_of(key, item)
            for key, item in value.items()
        }
    return msgspec.msgpack.Ext(_MAP, _pairs(value))


def _pairs(value: dict[Any, Any]) -> bytes:
    return _encode([[_pack(key), _pack_value_of(key, item)] for key, item in value.items()])


def _tensor(value: torch.Tensor) -> tuple[int, bytes]:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise _NotPlainError(value, f"is a {type(value).__name__} (a tensor subclass)")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise _NotPlainError(value, "is a sparse, quantized or meta tensor")
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes()
    return _TENSOR, _encode([_dtype_name(value.dtype), list(value.shape), raw])


def _array(value: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise _NotPlainError(value, f"is an array of {value.dtype}")
    raw = np.ascontiguousarray(value).tobytes()
    return _ARRAY, _encode([value.dtype.str, list(value.shape), raw])


def _scalar(value: np.generic) -> tuple[int, bytes]:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise _NotPlainError(value, f"is a scalar of {value.dtype}")
    return _SCALAR, _encode([value.dtype.str, value.tobytes()])


def _default(value: defaultdict[Any, Any]) -> tuple[int, bytes]:
    name = getattr(value.default_factory, "__name__", "")
    known = _FACTORIES.get(name) is value.default_factory
    return _DEFAULT, _encode([name if known else "", _pairs(value)])


def _enum(value: enum.Enum) -> tuple[int, bytes]:
    kind = type(value)
    return _ENUM, _encode([kind.__module__, kind.__qualname__, value.name])


def _sorted(value: Any) -> bytes:
    # Sets have no order of their own; sorting the encoded items makes equal sets equal bytes.
    return _encode(sorted(_encode(item) for item in _pack_items(value)))


_PACKERS: Final[dict[type, Callable[[Any], tuple[int, bytes]]]] = {
    tuple: lambda value: (_TUPLE, _encode(_pack_items(value))),
    set: lambda value: (_SET, _sorted(value)),
    frozenset: lambda value: (_FROZENSET, _sorted(value)),
    OrderedDict: lambda value: (_ORDERED, _pairs(value)),
    Counter: lambda value: (_COUNTER, _pairs(value)),
    defaultdict: _default,
    deque: lambda value: (_DEQUE, _encode([value.maxlen, _pack_items(value)])),
    torch.Size: lambda value: (_SIZE, _encode(list(value))),
    torch.dtype: lambda value: (_DTYPE, _encode(_dtype_name(value))),
    torch.device: lambda value: (_DEVICE, _encode(str(value))),
    complex: lambda value: (_COMPLEX, _encode([value.real, value.imag])),
    bytearray: lambda value: (_BYTEARRAY, bytes(value)),
    range: lambda value: (_RANGE, _encode([value.start, value.stop, value.step])),
}


def _inherited_packer(kind: type) -> Callable[[Any], tuple[int, bytes]] | None:
    if issubclass(kind, torch.Tensor):
        return _tensor
    if issubclass(kind, enum.Enum):
        return _enum
    if kind is np.ndarray:
        return _array
    if issubclass(kind, np.generic):
        return _scalar
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype called `name`, without the `torch.` prefix.

    Raises:
        ValueError: torch here has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _decode(data: bytes | memoryview) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_unpack)


def _unpack_pairs(data: bytes | memoryview) -> dict[Any, Any]:
    return dict(_decode(data))


def _unpack_default(data: bytes) -> dict[Any, Any]:
    name, pairs = _decode(data)
    if not name:
        return _unpack_pairs(pairs)
    return defaultdict(_FACTORIES[name], _unpack_pairs(pairs))


def _unpack_deque(data: bytes) -> deque[Any]:
    maxlen, items = _decode(data)
    return deque(items, maxlen)


def _unpack_tensor(data: bytes) -> torch.Tensor:
    name, shape, raw = _decode(data)
    dtype = dtype_named(name)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _unpack_array(data: bytes) -> np.ndarray[Any, Any]:
    dtype, shape, raw = _decode(data)
    return np.frombuffer(bytearray(raw), dtype=np.dtype(dtype)).reshape(shape)


def _unpack_scalar(data: bytes) -> Any:
    dtype, raw = _decode(data)
    return np.frombuffer(raw, dtype=np.dtype(dtype))[0]


def _unpack_enum(data: bytes) -> Any:
    module, qualname, member = _decode(data)
    # Only classes this process has loaded itself: bytes from a peer must not cause imports.
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError(f"enum {module}.{qualname} does not exist in this process")
    return found[member]


_UNPACKERS: Final[dict[int, Callable[[bytes], Any]]] = {
    _BIG_INT: lambda data: int.from_bytes(data, "little", signed=True),
    _TUPLE: lambda data: tuple(_decode(data)),
    _SET: lambda data: {_decode(item) for item in _decode(data)},
    _FROZENSET: lambda data: frozenset(_decode(item) for item in _decode(data)),
    _MAP: _unpack_pairs,
    _ORDERED: lambda data: OrderedDict(_decode(data)),
    _COUNTER: lambda data: Counter(_unpack_pairs(data)),
    _DEFAULT: _unpack_default,
    _DEQUE: _unpack_deque,
    _TENSOR: _unpack_tensor,
    _ARRAY: _unpack_array,
    _SCALAR: _unpack_scalar,
    _SIZE: lambda data: torch.Size(_decode(data)),
    _DTYPE: lambda data: dtype_named(_decode(data)),
    _DEVICE: lambda data: torch.device(_decode(data)),
    _ENUM: _unpack_enum,
    _COMPLEX: lambda data: complex(*_decode(data)),
    _BYTEARRAY: bytearray,
    _RANGE: lambda data: range(*_decode(data)),
}


def _unpack(code: int, data: memoryview) -> Any:
    unpacker = _UNPACKERS.get(code)
    if unpacker is None:
        raise ValueError(f"unknown kind {code}")
    return unpacker(bytes(data))
