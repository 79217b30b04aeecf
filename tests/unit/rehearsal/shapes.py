"""Calls of small imaginary roles."""

from __future__ import annotations

from trainmover.rehearsal.calls import CallShape


def reduce(numel: int, *, group: int = 0, size: int = 4) -> CallShape:
    """An all-reduce."""
    return CallShape("all_reduce", "SUM", group, size, ((numel,),), ("torch.float32",))


def message(kind: str, peer: str, numel: int = 8) -> CallShape:
    """A send or receive."""
    return CallShape(kind, "", 0, 4, ((numel,),), ("torch.float32",), peer)


def stage(rank: int, count: int, rows: int = 2) -> list[CallShape]:
    """One rank of a pipeline: warm-up as deep as the stages behind it, then alternating."""
    forward = [message("recv", "prev")] if rank else []
    forward += [message("send", "next")] if rank < count - 1 else []
    backward = [message("recv", "next")] if rank < count - 1 else []
    backward += [message("send", "prev")] if rank else []
    warm = min(count - 1 - rank, rows)
    calls = forward * warm
    for _ in range(rows - warm):
        calls += forward + backward
    return calls + backward * warm
