"""Plain data survives exactly, equal values give equal bytes, everything else is named."""

from __future__ import annotations

import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.codec import decode_plain, encode_plain


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.binary()
)
keys = st.integers() | st.text(st.characters(exclude_categories=("Cs",))) | st.tuples(scalars)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers() | st.text(st.characters(exclude_categories=("Cs",))))
    ),
    max_leaves=20,
)


def exactly(value: Any) -> Any:
    """The value with its types, comparable."""
    if isinstance(value, dict):
        return (type(value), [(exactly(key), exactly(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value), [exactly(item) for item in value])
    if isinstance(value, float):
        return (float, struct.pack("<d", value))
    return (type(value), value)


@given(plain)
def test_values_and_types_survive(value: Any) -> None:
    assert exactly(decode_plain(encode_plain(value))) == exactly(value)


@given(plain)
def test_bytes_are_deterministic(value: Any) -> None:
    data = encode_plain(value)
    assert encode_plain(decode_plain(data)) == data


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 0.1])
def test_float_bits(value: float) -> None:
    assert struct.pack("<d", decode_plain(encode_plain(value))) == struct.pack("<d", value)


def test_nan_payload_survives() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    assert struct.pack("<d", decode_plain(encode_plain([odd]))[0]) == struct.pack("<d", odd)


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**63) - 1,
        2**2000,
        Counter({3: 2, 9: 1}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2], maxlen=4),
        frozenset({1, "a"}),
        range(3, 9, 2),
        complex(1, -2),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        Colour.GREEN,
        {1: {2: (3, [4])}},
    ],
    ids=repr,
)
def test_other_plain_types(value: Any) -> None:
    again = decode_plain(encode_plain(value))
    assert again == value
    assert type(again) is type(value)


def test_defaultdicts() -> None:
    known = decode_plain(encode_plain(defaultdict(list, a=[1])))
    assert known["new"] == []
    foreign = decode_plain(encode_plain(defaultdict(lambda: 1, a=2)))
    assert type(foreign) is dict
    assert foreign == {"a": 2}


def test_equal_sets_give_equal_bytes() -> None:
    one = {f"name{index}" for index in range(50)}
    other = {f"name{index}" for index in reversed(range(50))}
    assert encode_plain(one) == encode_plain(other)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    value = torch.arange(count * dtype.itemsize, dtype=torch.uint8) % 2
    value = value.view(dtype).reshape(shape)
    again = decode_plain(encode_plain({"t": value}))["t"]
    assert again.dtype == dtype
    assert again.shape == value.shape
    if count:
        raw = value.reshape(-1).view(torch.uint8)
        assert torch.equal(again.reshape(-1).view(torch.uint8), raw)


def test_non_contiguous_and_conjugate_tensors() -> None:
    value = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(decode_plain(encode_plain(value)), value)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(decode_plain(encode_plain(conjugate)), conjugate)


def test_numpy() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2]
    again = decode_plain(encode_plain(array))
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)
    scalar = decode_plain(encode_plain(np.float32(0.1)))
    assert type(scalar) is np.float32
    assert scalar == np.float32(0.1)
    again[0, 0] = 7  # writable


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr_lambdas": [len]}, r"x\['lr_lambdas'\]\[0\] is a builtins.builtin_function"),
        ((1, {2: object()}), r"x\[1\]\[2\] is a builtins.object"),
        (np.array([None]), "is an array of object"),
        (torch.empty(1, device="meta"), "meta tensor"),
        (torch.eye(2).to_sparse(), "sparse"),
        (Point(1, 2), "Point"),
        ({object(): 1}, "is a builtins.object"),
        (recursive(), "contains itself"),
        ("\ud800", "not valid Unicode"),
        (torch.Generator(), "torch._C.Generator"),
    ],
)
def test_what_is_not_plain_is_named(value: Any, message: str) -> None:
    with pytest.raises(TrackError, match=message):
        encode_plain(value, "x")


@pytest.mark.parametrize("data", [b"", b"\xc1", encode_plain({"a": (1, 2)})[:-1], b"\xd4\x63\x00"])
def test_damaged_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(StateMismatch, match="can't be decoded"):
        decode_plain(data)


def test_an_enum_of_a_module_that_is_not_loaded_is_not_imported() -> None:
    data = encode_plain(Colour.RED).replace(Colour.__module__.encode(), b"x" * len(__name__))
    with pytest.raises(StateMismatch, match="does not exist in this process"):
        decode_plain(data)
