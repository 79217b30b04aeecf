"""Golden bytes: a change of the wire or of the journal is made on purpose, or not at all.

After a wanted change: ``python -m tests.unit.protocol.test_goldens`` writes the file anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.unit.protocol.samples import message_kinds, sample

GOLDENS = Path(__file__).with_name("goldens.txt")
KINDS = message_kinds()


def read_goldens() -> dict[str, str]:
    lines = GOLDENS.read_text(encoding="ascii").splitlines()
    return dict(line.rsplit(": ", 1) for line in lines if line)


def encoded(name: str) -> bytes:
    return msgspec.msgpack.encode(sample(KINDS[name]))


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_the_golden_ones(name: str) -> None:
    golden = read_goldens().get(name)
    assert encoded(name).hex() == golden, (
        f"{name} has changed on the wire; if that is wanted: "
        "python -m tests.unit.protocol.test_goldens"
    )


@pytest.mark.parametrize("name", KINDS)
def test_what_is_decoded_equals_what_was_encoded(name: str) -> None:
    value = sample(KINDS[name])
    assert msgspec.msgpack.decode(encoded(name), type=KINDS[name]) == value


def test_no_golden_is_left_of_a_message_that_is_gone() -> None:
    assert set(read_goldens()) == set(KINDS)


if __name__ == "__main__":
    GOLDENS.write_text(
        "".join(f"{name}: {encoded(name).hex()}\n" for name in KINDS), encoding="ascii"
    )
