"""Role classes: which ranks a standby can rehearse as one. Found, not declared.

Two ranks are of one class if their state has the same shapes and their first iterations issue the
same collectives. Point-to-point calls count as a set: pipeline stages in the middle differ in the
order of their warm-up only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash

from trainmover.rehearsal.calls import CallShape
from trainmover.state.inventory import Inventory
from trainmover.state.tensors import local_tensor

FORMAT = 1
"""Part of every fingerprint: a recording of another format is another recording."""


def fingerprint(
    script: bytes, arguments: Sequence[str], world_size: int, workers_per_machine: int
) -> str:
    """What a recording is bound to beside its class: script, arguments, layout, versions."""
    hasher = xxhash.xxh3_128()
    hasher.update(script)
    layout = (FORMAT, tuple(arguments), world_size, workers_per_machine, str(torch.__version__))
    hasher.update(repr(layout).encode())
    return hasher.hexdigest()


def state_digest(inventory: Inventory) -> str:
    """Shapes, dtypes and kinds of what was tracked; neither names nor offsets of shards."""
    entries = sorted(
        (kind, tuple(local_tensor(tensor).shape), str(tensor.dtype))
        for kind, _, tensor in inventory.live()
        if kind != "optimizer"
    )
    return xxhash.xxh3_64(repr(entries).encode()).hexdigest()


def class_digest(state: str, iterations: Iterable[Sequence[CallShape]]) -> str:
    """The class of a rank with this state and these first iterations."""
    hasher = xxhash.xxh3_64(state.encode())
    for shapes in iterations:
        collectives = [repr(shape) for shape in shapes if not shape.is_point_to_point]
        messages = sorted(repr(shape) for shape in shapes if shape.is_point_to_point)
        hasher.update(repr((collectives, messages)).encode())
    return hasher.hexdigest()
