"""Names of checkpoints and of the files in them.

Decides how things are called and which names are ours. Nothing is ever *ordered* by its name:
steps and lineages are read from manifests (C16), names only keep two attempts apart.

    step-0000000030-l2-g3-r1f0c9a/      committed: version (30, lineage 2), written in generation 3
                                        of a run whose id hashes to 1f0c9a
        MANIFEST.json                   last; without it the directory is nothing
        rank-00000.safetensors          bulk of one rank, or
        rank-00000.part-002-of-003.safetensors
        rank-00000.msgpack              description, personal and shared state of that rank
    writing-step-0000000030-l2-g3-r.../ being written, or left behind
        WRITING.json                    says whose it is
"""

from __future__ import annotations

import os
import re
from typing import Final, Protocol

from trainmover.checkpoint import hashing
from trainmover.errors import ConfigError

MANIFEST: Final = "MANIFEST.json"
DELETED: Final = "MANIFEST.deleted.json"
MARKER: Final = "WRITING.json"
STAGING_PREFIX: Final = "writing-"
MAX_ALTERNATIVES: Final = 9

_CHECKPOINT: Final = re.compile(r"step-(\d{10,})-l(\d+)-g(\d+)-r[0-9a-f]{6}(?:~[2-9])?", re.ASCII)
_PARTIAL: Final = r"(?:\.tmp-[0-9a-f]{8})?"
_SHARD: Final = re.compile(
    r"rank-\d{5,}(?:\.part-\d{3,}-of-\d{3,})?\.(?:safetensors|msgpack)" + _PARTIAL, re.ASCII
)
_OWN: Final = re.compile(r"(?:MANIFEST|MANIFEST\.deleted|WRITING)\.json" + _PARTIAL, re.ASCII)


class Version(Protocol):
    """What a name is made of: a rank's state, a manifest, a marker."""

    @property
    def run_id(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def lineage(self) -> int: ...
    @property
    def generation(self) -> int: ...


def name_of(version: Version) -> str:
    """Directory name of a checkpoint; all ranks come to the same one without talking.

    Two runs in one directory never come to the same one.
    """
    tag = hashing.checksum(version.run_id.encode())[:6]
    return f"step-{version.step:010d}-l{version.lineage}-g{version.generation}-r{tag}"


def staging_name(name: str) -> str:
    """Directory in which checkpoint `name` is written on a store that can rename."""
    return STAGING_PREFIX + name


def alternatives(name: str) -> list[str]:
    """Names to publish under, in order, where somebody else's directory occupies the first."""
    return [name, *(f"{name}~{number}" for number in range(2, MAX_ALTERNATIVES + 1))]


def is_checkpoint_name(name: str) -> bool:
    """True for names that `name_of` makes, alternatives included."""
    return _CHECKPOINT.fullmatch(name) is not None


def version_of(name: str) -> tuple[int, int]:
    """Lineage and step in a name of ours; for leftovers, which have no manifest to ask."""
    found = _CHECKPOINT.fullmatch(name)
    return (int(found.group(2)), int(found.group(1))) if found else (-1, -1)


def is_partial(name: str) -> bool:
    """True for a file of ours that never got its name."""
    return is_own_file(name) and ".tmp-" in name


def is_staging_name(name: str) -> bool:
    """True for names that `staging_name` makes."""
    return name.startswith(STAGING_PREFIX) and is_checkpoint_name(name[len(STAGING_PREFIX) :])


def is_own_file(name: str) -> bool:
    """True for files that this package writes into a checkpoint, half-written ones included."""
    return _SHARD.fullmatch(name) is not None or _OWN.fullmatch(name) is not None


def bulk_file(rank: int, part: int, part_count: int) -> str:
    """File of one part of a rank's bulk state; parts count from 1."""
    if part_count == 1:
        return f"rank-{rank:05d}.safetensors"
    return f"rank-{rank:05d}.part-{part:03d}-of-{part_count:03d}.safetensors"


def side_file(rank: int) -> str:
    """File of a rank's description, personal and shared state."""
    return f"rank-{rank:05d}.msgpack"


def rank_of(name: str) -> int | None:
    """Rank whose file it is; None for a manifest and for what is not ours."""
    found = _SHARD.fullmatch(name)
    return int(name.removeprefix("rank-").split(".")[0]) if found is not None else None


def partial_name(name: str) -> str:
    """Where `name` is written before it is renamed; no two calls give the same."""
    return f"{name}.tmp-{os.urandom(4).hex()}"


def check_relative(path: str) -> str:
    """`path` if it stays below its root. Raises ConfigError: a manifest must not lead outside."""
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"'{path}' leaves the checkpoint directory; refused")
    return path
