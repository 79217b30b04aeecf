"""Looks at the script's frames where Python itself does not tell."""

from __future__ import annotations

import dis
import sys
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


ENTRY = "/trainmover/worker/entry.py"
"""Whose frame calls `main`."""
PLAIN_CALLS = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/utils/_contextlib.py",
)
"""What lies between a script and a collective it calls itself."""


def is_called_by_script() -> bool:
    """Whether the script called here directly: no module, optimizer or autograd of torch is under
    way that an exception would leave halfway. Never true off the main thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(ENTRY):
            return True
        if "/torch/" in name and not name.endswith(PLAIN_CALLS):
            return False
        frame = frame.f_back
    return False
