"""Compiled code of a member for joiners on other machines: torch's own cache artefacts in a file.

Decides nothing about what torch keeps in them (it is torch's format, read by torch alone); checks
that the bytes are those that were written, because torch would load a damaged file without a word.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import xxhash

from trainmover.errors import RecordingError

MAGIC = b"TMCACH01"
SUFFIX = ".caches"
DIGEST_BYTES = 16


def save_caches(path: Path) -> int:
    """Write what this process has compiled to `path`, whole or not at all; bytes, 0: nothing.

    Raises OSError.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not utils.counters["stats"]["unique_graphs"]:
        return 0
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return 0
    data = artifacts[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + xxhash.xxh3_128(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return len(data)


def load_caches(path: Path) -> int:
    """Give what `path` holds to torch's compiler; bytes. Raises RecordingError naming the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"the compile caches {path} can't be read: {error}") from error
    begin = len(MAGIC) + DIGEST_BYTES
    data = text[begin:]
    if not text.startswith(MAGIC) or xxhash.xxh3_128(data).digest() != text[len(MAGIC) : begin]:
        raise RecordingError(f"the compile caches {path} are damaged; delete the file")
    torch.compiler.load_cache_artifacts(data)
    return len(data)


def load_folder(folder: Path) -> tuple[int, list[str]]:
    """Load every file of a folder: bytes, and what could not be used."""
    size, failed = 0, []
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ():
        try:
            size += load_caches(path)
        except RecordingError as error:
            failed.append(str(error))
    return size, failed
