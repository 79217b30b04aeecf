"""Bytes of frames and handshakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.communicator import frames
from trainmover.communicator import handshake as hs
from trainmover.errors import RemoteProtocolError

NAMES = st.text(max_size=30)


def test_header_has_a_fixed_size_and_comes_back() -> None:
    raw = frames.HEADER.pack(frames.FrameType.DATA, 1, 0, 5, 2**63, 2**64 - 1, 7, 100, 3, 9)
    header = frames.decode_header(b"xx" + raw, 2)
    assert len(raw) == frames.HEADER_BYTES == 48
    assert (header.slot, header.generation, header.length, header.check) == (5, 2**63, 100, 9)


@pytest.mark.parametrize("type_", [0, 9, 255])
def test_unknown_types_are_refused(type_: int) -> None:
    raw = frames.HEADER.pack(type_, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(RemoteProtocolError, match="malformed frame"):
        frames.decode_header(raw)


@given(st.lists(st.tuples(NAMES, NAMES)))
def test_edges_come_back(edges: list[tuple[str, str]]) -> None:
    assert frames.unpack_edges(frames.pack_edges(tuple(edges))) == tuple(edges)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_flags_come_back(flags: list[int]) -> None:
    assert frames.unpack_flags(frames.pack_flags(tuple(flags))) == tuple(flags)


def test_cut_poison_is_refused() -> None:
    raw = frames.pack_edges((("a", "b"),))
    with pytest.raises(RemoteProtocolError):
        frames.unpack_edges(raw[:-1])


@given(st.binary(max_size=200))
def test_random_handshakes_are_refused_by_name(raw: bytes) -> None:
    try:
        hs.decode(raw)
    except RemoteProtocolError:
        pass


def test_proofs_bind_every_part() -> None:
    hello = hs.Hello(
        job="j", generation=3, dialler="a", acceptor="b", machine="m", purpose="channel",
        nonce=b"n" * 16, ring="",
    )  # fmt: skip
    other = hs.Hello(
        job="j", generation=4, dialler="a", acceptor="b", machine="m", purpose="channel",
        nonce=b"n" * 16, ring="",
    )  # fmt: skip
    proofs = {
        hs.prove(b"s", "dialler", hello, b"x"),
        hs.prove(b"s", "acceptor", hello, b"x"),
        hs.prove(b"t", "dialler", hello, b"x"),
        hs.prove(b"s", "dialler", hello, b"y"),
        hs.prove(b"s", "dialler", other, b"x"),
    }
    assert len(proofs) == 5


def test_long_announcements_are_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        hs.body_length(hs.LENGTH.pack(1 << 20))
