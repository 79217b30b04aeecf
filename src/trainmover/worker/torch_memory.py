"""What torch remembers of one entry of `main` and must forget before the next one.

DTensor's caches are keyed by mesh, and two meshes of equal layout count as equal: the next entry
would be handed the last entry's mesh, with groups that are gone and the coordinate of another
rank. Decides which caches those are; not when an entry ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

PACKAGES: Final = ("torch.distributed.tensor", "torch.distributed.device_mesh")


def forget_meshes() -> None:
    """Clear every cache of torch that may hold a device mesh or a group."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _random
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _random._rng_tracker = None
    for cached in _cached_functions():
        cached.cache_clear()


def forget_compiled() -> None:
    """Drop compiled code, which may have names of groups and the place in a mesh written into it.

    Nothing guards them: code compiled as one rank of a tensor-parallel group would compute as that
    rank. What the compiler keeps on disk stays, so that the next compilation is a look-up.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _cached_functions() -> Iterator[Any]:
    """Functions of DTensor's modules, and static ones of their classes, that remember results."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(PACKAGES):
            continue
        for value in list(vars(module).values()):
            if callable(getattr(value, "cache_clear", None)) and not isinstance(value, type):
                yield value
            elif isinstance(value, type) and value.__module__ == name:
                yield from _cached_methods(value)


def _cached_methods(owner: type) -> Iterator[Any]:
    for value in vars(owner).values():
        function = getattr(value, "__func__", value)
        if callable(getattr(function, "cache_clear", None)) and not isinstance(function, type):
            yield function
