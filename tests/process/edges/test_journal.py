"""The journal on a real disk: terms, a late writer, a crash in mid-write, friendly refusals."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from trainmover.edges.journal import Journal, read_journal
from trainmover.errors import ConfigError, LocalProtocolError

ROOT = Path(__file__).parents[3]

WRITER = """
import sys
from pathlib import Path
from trainmover.edges.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.take_term()
number = 0
while True:
    number += 1
    journal.append(b"%d" % number)
    print(number, flush=True)
"""


def test_records_come_back_in_order_with_their_terms(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        assert journal.take_term() == 1
        journal.append(b"a")
        journal.append(b"b")
    with Journal(path) as journal:
        assert journal.take_term() == 2
        journal.append(b"c")
        rows = journal.read_all()
    assert [(row.sequence, row.term, row.data) for row in rows] == [
        (1, 1, b"a"),
        (2, 1, b"b"),
        (3, 2, b"c"),
    ]
    assert read_journal(path) == rows


def test_a_second_controller_on_this_machine_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path), pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        Journal(path)


def test_a_late_write_of_an_old_term_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as old:
        old.take_term()
        old.append(b"mine")
        # As a controller on another machine would, for which our lock means nothing.
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("UPDATE facts SET value = value + 1 WHERE name = 'term'")
        other.close()
        with pytest.raises(LocalProtocolError, match="another controller has taken over"):
            old.append(b"late")
        assert [row.data for row in old.read_all()] == [b"mine"]


def test_nothing_is_written_without_a_term(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal, pytest.raises(LocalProtocolError):
        journal.append(b"a")


def test_what_was_acknowledged_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert writer.stdout is not None
    said = 0
    while said < 20:
        said = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    said = max([said, *(int(line) for line in writer.stdout.read().split())])
    writer.wait()
    writer.stdout.close()
    with Journal(path) as journal:
        kept = [int(row.data) for row in journal.read_all()]
        assert journal.take_term() == 2
    assert kept[:said] == list(range(1, said + 1))
    assert len(kept) <= said + 1


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(ConfigError, match="is no journal"):
        Journal(path)
    with pytest.raises(ConfigError, match="no journal at"):
        read_journal(tmp_path / "nothing")
