"""The fence on a worker's progress page: it holds even while its interpreter is stuck."""

from __future__ import annotations

from typing import Final

from trainmover.edges.pages import Pages
from trainmover.protocol.messages import Commit, Fence, Freeze, Message, ToWorkerBody

FENCED_FOR_GOOD: Final = -1
NO_FENCE: Final = 0


def fence(pages: Pages, incarnation: str, body: ToWorkerBody | Message) -> None:
    """What a message to a worker means for its fence."""
    match body:
        case Freeze(number=number) if number > pages.read(incarnation).generation:
            pages.fence(incarnation, number)
        case Commit():
            # Later generations may be committed by a peer's frame before we hear of them.
            pages.fence(incarnation, NO_FENCE)
        case Fence():
            pages.fence(incarnation, FENCED_FOR_GOOD)
        case _:
            return
