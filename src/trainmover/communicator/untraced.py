"""Keeps torch.compile's tracer out of our Python.

torch calls groups from C++ in the middle of compiled regions (DDP rebuilds its buckets in the
second forward). Such a call begins a Python frame, which the tracer would take for the script's.
The functions are marked by hand because `torch.compiler.disable` imports the whole compiler.
"""

from __future__ import annotations

import types
from typing import Any

import torch


def keep_untraced(*classes: type) -> None:
    """Methods of these classes, and all they call, run as plain Python."""
    evaluation: Any = torch._C._dynamo.eval_frame
    skip = evaluation._FrameAction.SKIP
    strategy = evaluation._FrameExecStrategy(skip, skip)
    for owner in classes:
        for found in vars(owner).values():
            if isinstance(found, types.FunctionType):
                evaluation.set_code_exec_strategy(found.__code__, strategy)
