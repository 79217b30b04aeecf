"""How an address is written: HOST:PORT, an IPv6 host in brackets.

Decides the written form only; resolves nothing and opens nothing.
"""

from __future__ import annotations

import ipaddress

from trainmover.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_ipv6(host: str) -> bool:
    """Whether `host` is an IPv6 address as channels and listeners take it (without brackets)."""
    return ":" in host


def joined(host: str, port: int) -> str:
    """The written form of `host` and `port`."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ConfigError(f"expected HOST:PORT, got '{text}'")
    has_brackets = host.startswith("[") and host.endswith("]")
    if has_brackets:
        host = host[1:-1]
        if not _is_ipv6_literal(host):
            raise ConfigError(f"expected an IPv6 address in the brackets of '{text}'")
    elif ":" in host or "[" in host or "]" in host:
        raise ConfigError(f"expected HOST:PORT, an IPv6 host in brackets ([::1]:{port}): '{text}'")
    return host, int(port)


def _is_ipv6_literal(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
