"""First messages of a link between agent and controller, and of an operator's session."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.messages import Message

LINK_VERSION: Final = 1
AGENT_PATH: Final = "/v1/agent"
OPERATOR_PATH: Final = "/v1/operator"

CLOSE_BAD_TOKEN: Final = 4401
CLOSE_BAD_VERSION: Final = 4426
CLOSE_SUPERSEDED: Final = 4409
CLOSE_PROTOCOL: Final = 4400
CLOSE_TOO_SLOW: Final = 4408

SESSION_HEADER: Final = "X-Trainmover-Session"
"""``SESSION COUNTER PROOF`` of an operator's request."""
PROOF_HEADER: Final = "X-Trainmover-Proof"
"""The controller's proof over its answer."""


class Challenge(Message, frozen=True):
    """Controller to agent: prove that you know the token."""

    version: int
    nonce: bytes


class ChallengeAnswer(Message, frozen=True):
    """Agent to controller."""

    machine: str
    nonce: bytes
    proof: bytes


class ChallengeAccepted(Message, frozen=True):
    """Controller to agent: the controller knows the token, too."""

    proof: bytes


class SessionOpened(Message, frozen=True):
    """Controller to operator: answer to a session request with the operator's nonce."""

    session: str
    nonce: bytes
    proof: bytes


T = TypeVar("T")


def decode_as(kind: type[T], data: bytes, sender: str) -> T:
    """`data` as one message of `kind`. Raises RemoteProtocolError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        name = getattr(kind, "__name__", str(kind))
        text = f"expected {name} from {sender}, got {len(data)} bytes: {error}"
        raise RemoteProtocolError(text) from error
