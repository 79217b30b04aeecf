"""Bytes of messages: msgpack, validated on decode; nothing else is ever accepted from a wire."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.messages import (
    FromAgentMessage,
    FromWorkerBody,
    Message,
    ToAgentMessage,
    ToWorkerBody,
)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_agent = msgspec.msgpack.Decoder(FromAgentMessage)
_to_agent = msgspec.msgpack.Decoder(ToAgentMessage)
_from_worker = msgspec.msgpack.Decoder(FromWorkerBody)
_to_worker = msgspec.msgpack.Decoder(ToWorkerBody)


def encode(message: Message) -> bytes:
    """Bytes of any message."""
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, sender: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        text = f"expected a message of this version from {sender}, got {len(data)} bytes: {error}"
        raise RemoteProtocolError(text) from error


def decode_from_agent(data: bytes) -> FromAgentMessage:
    """What an agent sent to the controller. Raises RemoteProtocolError."""
    return _decode(_from_agent, data, "an agent")


def decode_to_agent(data: bytes) -> ToAgentMessage:
    """What the controller sent to an agent. Raises RemoteProtocolError."""
    return _decode(_to_agent, data, "the controller")


def decode_from_worker(data: bytes) -> FromWorkerBody:
    """What a worker sent to its agent. Raises RemoteProtocolError."""
    return _decode(_from_worker, data, "a worker")


def decode_to_worker(data: bytes) -> ToWorkerBody:
    """What the agent handed to a worker. Raises RemoteProtocolError."""
    return _decode(_to_worker, data, "the agent")
