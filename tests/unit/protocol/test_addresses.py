"""Addresses are written one way; wrong forms get one line."""

from __future__ import annotations

import pytest

from trainmover.errors import ConfigError
from trainmover.protocol.addresses import joined, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:29400", "localhost", 29400),
        ("10.0.0.7:0", "10.0.0.7", 0),
        ("[::1]:29400", "::1", 29400),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_an_address_is_read_as_it_is_written(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert joined(host, port) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("::1:29400", "an IPv6 host in brackets"),
        ("[::1:29400", "an IPv6 host in brackets"),
        ("[::1]", "expected HOST:PORT"),
        ("[host]:29400", "an IPv6 address in the brackets"),
        ("host", "expected HOST:PORT"),
        ("host:", "expected HOST:PORT"),
        (":29400", "expected HOST:PORT"),
        ("host:70000", "expected HOST:PORT"),
        ("host:-1", "expected HOST:PORT"),
    ],
)
def test_a_wrong_form_gets_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(text)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
