"""WRITING.json: whose an unfinished checkpoint is, so that it can be told from other people's.

Decides what stands in it. It is written before the first shard, is the same from every rank, and
says nothing about whether anything is complete.
"""

from __future__ import annotations

import msgspec

from trainmover.checkpoint import names
from trainmover.checkpoint.store import Store
from trainmover.errors import StorageVanished


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of WRITING.json."""

    checkpoint: str
    """Name under which it would be published."""
    run_id: str
    step: int
    lineage: int
    generation: int


def mark(store: Store, folder: str, version: names.Version) -> None:
    """Write the marker unless another rank has."""
    if names.MARKER in store.list_files(folder):
        return
    marker = Marker(
        checkpoint=names.name_of(version),
        run_id=version.run_id,
        step=version.step,
        lineage=version.lineage,
        generation=version.generation,
    )
    store.put(f"{folder}/{names.MARKER}", msgspec.json.encode(marker))


def read_marker(store: Store, folder: str) -> Marker | None:
    """The marker of a directory; None where there is none, or none of ours."""
    try:
        marker = msgspec.json.decode(store.read(f"{folder}/{names.MARKER}"), type=Marker)
    except (StorageVanished, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    expected = folder.removeprefix(names.STAGING_PREFIX)
    return marker if marker.checkpoint == expected.split("~")[0] else None
