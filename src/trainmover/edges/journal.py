"""The controller's journal: one SQLite file, one writer, every append checks the term.

Decides whether a write may happen: a controller that was hung while another took over must not
write a late commit (protocol.md A15). The term is taken by compare-and-set in the same
transaction that checks it; a lock of the operating system refuses a second controller on this
machine outright. What a record means is not known here.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from trainmover.edges import clock
from trainmover.errors import ConfigError, LocalProtocolError

FORMAT: Final = 1
BUSY_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRecord:
    """One row: bytes of a record with its place."""

    sequence: int
    term: int
    at_ns: int
    """Writer's monotonic clock."""
    wall_s: float
    """Seconds since the epoch, for people only."""
    data: bytes


class Journal:
    """An open journal file; `take_term` before the first `append`."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`. Raises ConfigError if it is in use or is no journal."""
        self._path = path
        self._term = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"the journal {path} can't be made: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 64, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            text = (
                f"the journal {path} is in use by another controller (pid {owner}); stop it first"
            )
            raise ConfigError(text) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        try:
            self._database = self._open()
        except sqlite3.DatabaseError as error:
            os.close(self._lock)
            raise ConfigError(f"{path} is no journal of trainmover: {error}") from error

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        with _transaction(database):
            database.execute(
                "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL)"
            )
            database.execute(
                "CREATE TABLE IF NOT EXISTS entries (sequence INTEGER PRIMARY KEY, "
                "term INTEGER NOT NULL, at_ns INTEGER NOT NULL, wall_s REAL NOT NULL, "
                "data BLOB NOT NULL)"
            )
            database.execute("INSERT OR IGNORE INTO facts VALUES ('format', ?)", (FORMAT,))
            database.execute("INSERT OR IGNORE INTO facts VALUES ('term', 0)")
            found = database.execute("SELECT value FROM facts WHERE name='format'").fetchone()
        if found[0] != FORMAT:
            database.close()
            text = f"format {found[0]} instead of {FORMAT}; use the trainmover that wrote it"
            raise sqlite3.DatabaseError(text)
        return database

    @property
    def term(self) -> int:
        """Term taken by this object; 0 before `take_term`."""
        return self._term

    def take_term(self) -> int:
        """A term larger than all before; from now on every other writer is refused."""
        with _transaction(self._database):
            found = self._database.execute("SELECT value FROM facts WHERE name='term'").fetchone()
            term = int(found[0]) + 1
            self._database.execute("UPDATE facts SET value=? WHERE name='term'", (term,))
        self._term = term
        return term

    def append(self, data: bytes) -> StoredRecord:
        """Write one record durably; it is on disk on return.

        Raises:
            LocalProtocolError: Another controller has taken a larger term: this one must end.
        """
        at_ns, wall_s = clock.now(), time.time()
        with _transaction(self._database):
            found = self._database.execute("SELECT value FROM facts WHERE name='term'").fetchone()
            if self._term == 0 or found[0] != self._term:
                raise LocalProtocolError(
                    f"the journal's term is {found[0]}, this controller's {self._term}: "
                    "another controller has taken over, this one stops"
                )
            cursor = self._database.execute(
                "INSERT INTO entries (term, at_ns, wall_s, data) VALUES (?, ?, ?, ?)",
                (self._term, at_ns, wall_s, data),
            )
        sequence = int(cursor.lastrowid or 0)
        return StoredRecord(
            sequence=sequence, term=self._term, at_ns=at_ns, wall_s=wall_s, data=data
        )

    def read_all(self) -> list[StoredRecord]:
        """Every record in order."""
        return _rows(self._database)

    def close(self) -> None:
        """Give the file and the lock back."""
        self._database.close()
        os.close(self._lock)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> list[StoredRecord]:
    """Records of a journal that may be in use; read-only. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"no journal at {path}")
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
        try:
            return _rows(database)
        finally:
            database.close()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} is no journal of trainmover: {error}") from error


def _rows(database: sqlite3.Connection) -> list[StoredRecord]:
    query = "SELECT sequence, term, at_ns, wall_s, data FROM entries ORDER BY sequence"
    return [
        StoredRecord(sequence=row[0], term=row[1], at_ns=row[2], wall_s=row[3], data=row[4])
        for row in database.execute(query)
    ]


class _transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when an exception passes."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")
