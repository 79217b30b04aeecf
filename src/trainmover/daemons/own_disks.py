"""This machine's own disk, as its agent lets others see it.

Decides what may be read: files of ours in committed checkpoints of the local tier, nothing else.
Whatever directories the tier has here are shown, also those of names that this machine has had
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainmover.checkpoint import names
from trainmover.checkpoint.bounded import Watch
from trainmover.checkpoint.choice import fingerprint
from trainmover.checkpoint.failures import named
from trainmover.checkpoint.reader import Checkpoint
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed, read_manifest, survey
from trainmover.checkpoint.tiers import open_disk, open_disks
from trainmover.edges import faults
from trainmover.edges.snapshot_wire import CheckFiles, CheckpointOnDisk, ReadFile
from trainmover.errors import ConfigError
from trainmover.topology.keeping import CheckpointConfig, Keeping

READ_PHASE: Final = "disk_read"
"""Another machine's rank reads its state here: no phase of a switchover, but drills may strike."""


class OwnDisk:
    """The local tier of one machine; methods are called on threads of the data port."""

    def __init__(self, machine: str, keeping: Callable[[], Keeping]) -> None:
        self._machine = machine
        self._keeping = keeping

    def look(self) -> tuple[CheckpointOnDisk, ...]:
        """Every checkpoint, and every directory that should be one. Raises StorageFailed."""
        config = self._keeping().checkpoint
        found: list[CheckpointOnDisk] = []
        for folder, store in open_disks(config, self._machine).items():
            found += _look(folder, store)
        return tuple(found)

    def read(self, request: ReadFile, into: memoryview) -> int:
        """Bytes of a file. Raises CheckpointError, ConfigError."""
        name, _, file = request.path.rpartition("/")
        if not names.is_checkpoint_name(name) or not names.is_own_file(file):
            raise ConfigError(f"'{request.path}' is no file of a checkpoint; refused")
        store = self._open(request.folder)
        if file != names.MANIFEST:
            faults.reached(READ_PHASE, self._machine)
        opened = store.open(request.path)
        try:
            return opened.read_into(request.position, into)
        except OSError as error:
            raise named(error, "reading", f"{store.location}/{request.path}") from error
        finally:
            opened.close()

    def check(
        self, request: CheckFiles, moved: Callable[[int], None]
    ) -> tuple[tuple[str, str], ...]:
        """Files that differ from the manifest that lies beside them. Raises CheckpointError."""
        store = self._open(request.folder)
        if not names.is_checkpoint_name(request.name):
            raise ConfigError(f"'{request.name}' is no checkpoint; refused")
        committed = Committed(name=request.name, manifest=read_manifest(store, request.name))
        checkpoint = Checkpoint((store,), committed, _Told(moved))
        damages = checkpoint.verify(only=frozenset(request.paths))
        known = {file.path for file in committed.manifest.files}
        absent = [
            (path, "not in the manifest there") for path in request.paths if path not in known
        ]
        return (*((damage.path, damage.reason) for damage in damages), *absent)

    def _open(self, folder: str) -> Store:
        config: CheckpointConfig = self._keeping().checkpoint
        if not config.local_directory:
            raise ConfigError("this machine has no disk of its own for checkpoints")
        return open_disk(config, folder)


def _look(folder: str, store: Store) -> list[CheckpointOnDisk]:
    seen = survey(store)
    whole = [(one.name, fingerprint(one.manifest)) for one in seen.committed]
    return [
        CheckpointOnDisk(
            folder=folder, name=name, fingerprint=mark, files=tuple(store.list_files(name).items())
        )
        for name, mark in (*whole, *((one.name, "") for one in seen.rejected))
    ]


class _Told(Watch):
    """Hands progress on."""

    def __init__(self, moved: Callable[[int], None]) -> None:
        super().__init__()
        self._moved = moved

    def moved(self, byte_count: int = 1) -> None:
        """As `Watch.moved`."""
        super().moved(byte_count)
        self._moved(byte_count)
