"""A large payload on its way in: into its tensor, into memory of its own, or nowhere any more."""

from __future__ import annotations

import torch

from trainmover.communicator.frames import Header
from trainmover.communicator.operation import Receive
from trainmover.communicator.ports import Port


class Arrival:
    """What a channel knows of the one large payload that it is receiving."""

    __slots__ = ("header", "port", "receive", "view", "filled", "scratch", "is_pooled")

    def __init__(self, header: Header, port: Port | None) -> None:
        self.header = header
        self.port = port
        self.receive: Receive | None = None
        self.view = memoryview(b"")
        self.filled = 0
        self.scratch: torch.Tensor | bytearray | None = None
        self.is_pooled = False

    def divert(self) -> None:
        """Let the rest of the payload go nowhere."""
        if self.receive is not None or not isinstance(self.scratch, bytearray):
            self.receive = None
            self.port = None
            self.scratch = None
            self.view = memoryview(bytearray(len(self.view)))
