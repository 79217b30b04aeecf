"""State moves between two processes' objects exactly, or the first difference is named."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.state.toy import Run
from torch import nn

from trainmover.errors import StateMismatch, TransportError
from trainmover.state import transfer
from trainmover.state.inventory import Inventory
from trainmover.state.transfer import TransferReport, receive_state, serve_state
from trainmover.state.value import Value

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    left.settimeout(20)
    right.settimeout(20)
    yield left, right
    left.close()
    right.close()


class Served:
    """A source that serves on its own thread."""

    def __init__(self, stream: socket.socket, inventory: Inventory, **options: Any) -> None:
        self.report: TransferReport | None = None
        self.problem: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(stream, inventory, options))
        self.thread.start()

    def _run(self, stream: socket.socket, inventory: Inventory, options: Any) -> None:
        try:
            self.report = serve_state(stream, inventory, **options)
        except Exception as problem:
            self.problem = problem

    def join(self) -> Served:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self


def test_a_fresh_joiner_gets_everything(pair: Pair) -> None:
    source, joiner = Run(seed=1), Run(seed=2)
    for _ in range(3):
        source.step()
    joiner.step()
    parameter = joiner.model.hidden.weight
    seen: list[float] = []
    served = Served(pair[0], source.inventory, smalls=True)
    report = receive_state(pair[1], joiner.inventory, progress=seen.append)
    assert served.join().problem is None
    assert joiner.model.hidden.weight is parameter
    assert joiner.everything() == source.everything()
    assert report.bulk_digest == source.inventory.bulk_digest()
    assert served.report is not None
    assert served.report.bulk_digest == report.bulk_digest
    assert served.report.small_digests == report.small_digests
    assert list(report.small_digests) == list(source.inventory.small_names)
    assert report.entries == len(source.inventory.bulk())
    assert report.bytes == source.inventory.manifest().total_bytes
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    rng = torch.get_rng_state()
    for _ in range(3):
        source.step()
    torch.set_rng_state(rng)
    for _ in range(3):
        joiner.step()
    assert joiner.losses[-3:] == source.losses[-3:]
    assert joiner.everything() == source.everything()


def test_without_small_leaves(pair: Pair) -> None:
    source, joiner = Run(seed=1), Run(seed=2)
    source.best.value = 5.0
    served = Served(pair[0], source.inventory, smalls=False)
    report = receive_state(pair[1], joiner.inventory)
    served.join()
    assert report.small_digests == {}
    assert joiner.best.value == 1e9
    assert joiner.inventory.bulk_digest() == source.inventory.bulk_digest()


def odd(fill: int) -> nn.Module:
    """Every shape of memory, over several chunks."""
    model = nn.Module()
    generator = torch.Generator()
    generator.manual_seed(fill)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)

    many = 3 * transfer.CHUNK_BYTES // 4 + 5
    buffers = {
        "scalar": noise(4).view(torch.float32)[0],
        "empty": torch.empty(0, 4),
        "turned": noise(4 * 600, 700).view(torch.float32).t(),
        "turned_small": noise(4, 12).view(torch.int32).t(),
        "half": noise(2 * 31).view(torch.bfloat16),
        "eighth": noise(7).view(torch.float8_e5m2),
        "complex": noise(64).view(torch.complex64),
        "conjugate": noise(64).view(torch.complex64).conj(),
        "truth": noise(9) > 100,
        "large": noise(4 * many).view(torch.float32),
        "sliced": noise(20, 8)[::2, ::3],
        "last": noise(3),
        "channels": noise(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    }
    for name, buffer in buffers.items():
        model.register_buffer(f"{name}_one", buffer)
    for index in range(2 * transfer.PIECES_PER_CHUNK):
        model.register_buffer(f"tiny{index}", noise(1))
    return model


def test_every_kind_of_tensor(pair: Pair) -> None:
    source, joiner = Inventory({"m": odd(1)}), Inventory({"m": odd(2)})
    assert source.bulk_digests() != joiner.bulk_digests()
    pointers = [tensor.data_ptr() for _, tensor in joiner.bulk()]
    strides = [tensor.stride() for _, tensor in joiner.bulk()]
    served = Served(pair[0], source, smalls=True)
    receive_state(pair[1], joiner)
    assert served.join().problem is None
    assert joiner.bulk_digests() == source.bulk_digests()
    assert [tensor.data_ptr() for _, tensor in joiner.bulk()] == pointers
    assert [tensor.stride() for _, tensor in joiner.bulk()] == strides


def test_nothing_tracked(pair: Pair) -> None:
    served = Served(pair[0], Inventory({}), smalls=True)
    assert receive_state(pair[1], Inventory({})).bytes == 0
    assert served.join().problem is None


def recorded(inventory: Inventory) -> bytes:
    """Everything a source sends."""
    left, right = socket.socketpair()
    right.shutdown(socket.SHUT_WR)  # so that the source does not wait for a verdict

    def serve() -> None:
        with left, pytest.raises(TransportError, match="closed the connection"):
            serve_state(left, inventory, smalls=True)

    thread = threading.Thread(target=serve)
    thread.start()
    parts = []
    with right:
        while part := right.recv(1 << 20):
            parts.append(part)
    thread.join(10)
    return b"".join(parts)


def replayed(data: bytes, inventory: Inventory) -> TransferReport:
    """Receive from a source that sends the given bytes and then closes its side."""
    left, right = socket.socketpair()
    right.settimeout(20)

    def send() -> None:
        try:
            left.sendall(data)
            left.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the receiver gave up before the end

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with right:
            return receive_state(right, inventory)
    finally:
        thread.join(10)
        left.close()


def damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def manifest_bytes(inventory: Inventory) -> int:
    return transfer._HEADER.size + len(msgspec.msgpack.encode(inventory.manifest()))


def test_a_recorded_stream_is_good() -> None:
    source, joiner = Run(seed=1), Run(seed=2)
    replayed(recorded(source.inventory), joiner.inventory)
    assert joiner.everything() == source.everything()


@pytest.mark.parametrize("name", ["model.embedding.weight", "model.hidden.bias", "model.norm.bias"])
def test_a_damaged_byte_is_named(name: str) -> None:
    source, joiner = Run(seed=1), Run(seed=1)
    entry = next(e for e in source.inventory.manifest().entries if e.name == name)
    place = manifest_bytes(source.inventory) + entry.offset + 1
    with pytest.raises(StateMismatch, match=rf"bytes of {name} were damaged"):
        replayed(damaged(recorded(source.inventory), place), joiner.inventory)


def test_no_damaged_byte_passes() -> None:
    source, joiner = Run(seed=1), Run(seed=1)
    data = recorded(source.inventory)
    padding = range(5, 8)  # of the first header; the other headers are checked below
    places = [*range(24), *range(24, len(data), 97), *range(len(data) - 60, len(data))]
    for place in places:
        if place in padding:
            continue
        try:
            replayed(damaged(data, place), joiner.inventory)
        except (StateMismatch, TransportError):
            continue
        assert joiner.everything() == source.everything(), f"byte {place}"


def test_damaged_small_leaves_change_nothing() -> None:
    source, joiner = Inventory({"v": Value("x" * 100)}), Inventory({"v": Value("y")})
    data = damaged(recorded(source), manifest_bytes(source) + transfer._HEADER.size + 60)
    with pytest.raises(StateMismatch, match="damaged on the way"):
        replayed(data, joiner)
    assert joiner.tracked["v"].value == "y"  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", [0.0, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_a_stream_that_ends_early(part: float) -> None:
    source, joiner = Run(seed=1), Run(seed=2)
    data = recorded(source.inventory)
    with pytest.raises(TransportError, match="closed the connection"):
        replayed(data[: int(part * len(data))], joiner.inventory)


def test_a_joiner_that_dies_is_noticed(pair: Pair) -> None:
    served = Served(pair[0], Inventory({"m": odd(1)}), smalls=True)
    pair[1].recv(100)
    pair[1].close()
    assert isinstance(served.join().problem, TransportError)


def test_silence_is_bounded(pair: Pair) -> None:
    pair[1].settimeout(0.05)
    with pytest.raises(TransportError, match=r"sent no state for 0.05 s"):
        receive_state(pair[1], Run().inventory)


def test_a_receiver_that_does_not_read_is_bounded(pair: Pair) -> None:
    model = nn.Module()
    model.register_buffer("large", torch.zeros(64 << 20, dtype=torch.uint8))
    pair[0].settimeout(0.05)
    with pytest.raises(TransportError, match="took no state"):
        serve_state(pair[0], Inventory({"m": model}), smalls=False)


def test_a_joiner_of_another_shape_refuses_and_the_source_hears_why(pair: Pair) -> None:
    source, joiner = Inventory({"m": nn.Linear(2, 3)}), Inventory({"m": nn.Linear(2, 4)})
    served = Served(pair[0], source, smalls=True)
    with pytest.raises(StateMismatch, match="m.weight"):
        receive_state(pair[1], joiner)
    assert isinstance(served.join().problem, StateMismatch)
    assert "m.weight" in str(served.problem)


class Stubborn:
    """Does not take its state."""

    def state_dict(self) -> dict[str, int]:
        return {"id": id(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last = copy.copy(state)


def test_an_object_that_does_not_load_is_named(pair: Pair) -> None:
    one, other = Stubborn(), Stubborn()
    served = Served(pair[0], Inventory({"odd": one}), smalls=True)
    with pytest.raises(StateMismatch, match="small leaf odd is not what was loaded"):
        receive_state(pair[1], Inventory({"odd": other}))
    served.join()


class Dies(RuntimeError):
    """Injected by a progress callback."""


def test_progress_can_inject_a_death(pair: Pair) -> None:
    def die(part: float) -> None:
        if part > 0.4:
            raise Dies

    source, joiner = Inventory({"m": odd(1)}), Inventory({"m": odd(2)})
    served = Served(pair[0], source, smalls=True, progress=die)
    pair[1].settimeout(0.2)
    with pytest.raises(TransportError):
        receive_state(pair[1], joiner)
    assert isinstance(served.join().problem, Dies)
