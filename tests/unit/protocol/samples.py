"""One value of each message and record, made from its type: small, fixed, every field set."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

from trainmover.protocol import handshake, journal, messages, nursery


def sample(kind: Any, depth: int = 0) -> Any:
    """A fixed value of `kind`."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _sample_tuple(typing.get_args(kind), depth)
    if origin is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice)
    if origin in (typing.Union, types.UnionType):
        return sample(next(k for k in typing.get_args(kind) if k is not type(None)), depth)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{name: sample(hints[name], depth + 1) for name in kind.__struct_fields__})
    return {bool: True, int: 7, float: 1.5, str: "a", bytes: b"b"}[kind]


def _sample_tuple(arguments: tuple[Any, ...], depth: int) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return (sample(arguments[0], depth),)
    return tuple(sample(argument, depth) for argument in arguments)


def message_kinds() -> dict[str, type[msgspec.Struct]]:
    """Every message that crosses a process boundary, and every record, by tag."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module in (messages, nursery, handshake):
        for value in vars(module).values():
            is_message = isinstance(value, type) and issubclass(value, messages.Message)
            if is_message and value is not messages.Message:
                found[value.__name__] = value
    for kind in typing.get_args(journal.AnyRecord):
        found[f"record {kind.__name__}"] = kind
    return dict(sorted(found.items()))
