"""Looks at the script's frames where Python itself does not tell."""

from __future__ import annotations

import dis
from types import FrameType

LEAVING = ("POP_TOP", "POP_ITER", "END_FOR", "SWAP", "POP_BLOCK")
"""What CPython executes when `break` or `return` drops a loop's iterator."""


def is_leaving_by_break(frame: FrameType | None) -> bool:
    """Whether `frame` drops its loop's iterator by `break` or `return`, not by an exception.

    A generator that is closed can't tell: while an exception unwinds the loop it is not visible to
    the code that runs in the generator. The instruction that the frame stands at is.
    """
    if frame is None:
        return False
    code = frame.f_code.co_code
    if not 0 <= frame.f_lasti < len(code):
        return False
    return dis.opname[code[frame.f_lasti]] in LEAVING
