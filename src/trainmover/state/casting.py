"""State saved in other dtypes than it is held in now: refused by name, or cast where asked for.

Decides which entries differ in nothing but their dtype, and what a cast makes of their bytes.
Whether casting was asked for is the caller's to know. Nothing is ever cast silently.
"""

from __future__ import annotations

import msgspec
import torch

from trainmover.errors import StateMismatch
from trainmover.state.codec import dtype_named
from trainmover.state.inventory import Inventory
from trainmover.state.manifest import StateEntry, StateManifest


def in_dtypes_of(inventory: Inventory, manifest: StateManifest) -> tuple[StateManifest, list[str]]:
    """`manifest` in the dtypes held here, and what of it has another one, in words.

    Optimizer state that had its parameter's dtype follows it, as `Optimizer.load_state_dict` does.
    """
    here = {entry.name: entry for entry in inventory.manifest().entries}
    there = {entry.name: entry for entry in manifest.entries}
    parameters = {name: entry.dtype for name, entry in here.items() if entry.kind == "parameter"}
    entries: list[StateEntry] = []
    words: list[str] = []
    offset = 0
    for entry in manifest.entries:
        dtype = entry.dtype
        if entry.kind == "optimizer":
            owner = entry.name.partition(".state[")[2].rpartition("].")[0]
            if owner in parameters and owner in there and there[owner].dtype == dtype:
                dtype = parameters[owner]
        elif entry.name in here:
            dtype = here[entry.name].dtype
        if dtype != entry.dtype:
            words.append(f"{entry.name} is {entry.dtype} there and {dtype} here")
        size = entry.size_bytes // item_bytes(entry.dtype) * item_bytes(dtype)
        entries.append(msgspec.structs.replace(entry, dtype=dtype, size_bytes=size, offset=offset))
        offset += size
    return msgspec.structs.replace(manifest, entries=tuple(entries)), words


def check_cast(words: list[str], *, is_allowed: bool) -> None:
    """Refuse a cast nobody asked for.

    Raises:
        StateMismatch: Names the first tensor and the setting.
    """
    if words and not is_allowed:
        more = f" (and {len(words) - 1} more)" if len(words) > 1 else ""
        raise StateMismatch(
            f"{words[0]}{more}: nothing is cast unless asked for, --set checkpoint.allows_cast=true"
        )


def cast_bytes(data: bytearray | memoryview, there: str, here: str) -> memoryview:
    """Elements of one dtype as bytes of another, rounded as torch rounds."""
    if not len(data):
        return memoryview(b"")
    saved = torch.frombuffer(data, dtype=torch.uint8).view(dtype_named(there))
    cast = saved.to(dtype_named(here)).view(torch.uint8)
    view: memoryview = cast.numpy().data
    return view


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return torch.empty((), dtype=dtype_named(dtype)).element_size()
