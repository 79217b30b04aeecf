"""Who reads the rank while `main` builds: named outside known objects, silent otherwise."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from trainmover.worker.rank_reads import NotingEnviron, RankReads, watch_environment


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankReads]:
    monkeypatch.setenv("RANK", "3")
    kind = os.environ.__class__
    made = RankReads()
    watch_environment(made)
    made.begin()
    yield made
    os.environ.__class__ = kind


def test_the_script_is_named_once_per_line(reads: RankReads) -> None:
    for _ in range(2):
        assert os.environ["RANK"] == "3"
    assert len(reads.places) == 1
    assert reads.places[0].startswith("test_rank_reads.py:")
    assert os.environ.get("LOCAL_RANK", "0") == "0"
    assert len(reads.places) == 2


def test_other_variables_and_later_reads_are_not_noted(reads: RankReads) -> None:
    assert os.environ.get("PATH") is not None
    reads.end()
    assert os.environ["RANK"] == "3"
    reads.note_place("a sub-group")
    assert reads.places == ()
    reads.begin()
    reads.note_place("a sub-group")
    assert reads.places == ("a sub-group",)


def test_known_objects_are_silent(reads: RankReads) -> None:
    sampler = DistributedSampler(torch.arange(8), num_replicas=2, rank=1)
    assert len(list(sampler)) == 4
    assert reads.places == ()
    assert isinstance(os.environ, NotingEnviron)


def test_whoever_asks_the_environment_is_the_reader_not_python_itself(reads: RankReads) -> None:
    """The compiler copies the environment while `main` builds; no object depends on that."""
    text = "import os\nos.environ.get('RANK')\nos.environ.copy()\nos.getenv('RANK')\n"
    exec(compile(text, "/lib/torch/_inductor/cpp_builder.py", "exec"))
    assert reads.places == ()
    exec(compile(text, "/scripts/train.py", "exec"))
    assert reads.places == ("train.py:2", "train.py:3", "train.py:4")


def test_what_the_script_reads_in_front_of_main_stays_for_all_entries(reads: RankReads) -> None:
    reads.begin_script()
    exec(compile("import os\nos.environ['RANK']\n", "/scripts/train.py", "exec"))
    reads.begin()
    exec(compile("import os\nos.environ['RANK']\n", "/scripts/model.py", "exec"))
    assert reads.in_script == ("/scripts/train.py:2",)
    assert reads.places == ("train.py:2", "model.py:2")
    reads.begin()
    assert reads.places == ("train.py:2",)
    reads.begin_script()
    assert reads.places == (), "it starts anew"


def test_an_installed_library_that_is_imported_is_no_reader(
    reads: RankReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported once in a process: nothing that runs again would change what it read."""
    for folder, name in (("lib/site-packages", "installed_one"), ("own", "own_one")):
        (tmp_path / folder).mkdir(parents=True)
        text = "import os\ndef read():\n    return dict(os.environ.items())\nread()\n"
        (tmp_path / folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    installed = importlib.import_module("installed_one")
    assert reads.places == ()
    importlib.import_module("own_one")
    assert reads.places == ("own_one.py:3",)
    installed.read()
    assert reads.places == ("own_one.py:3", "installed_one.py:3"), "called, not imported"


def test_who_shares_state_out_by_rank_is_a_reader(reads: RankReads) -> None:
    """The sharded optimizer asks for its rank, and no later change of rank moves its shards."""
    code = "def build():\n    import os\n    return os.environ['RANK']\n"
    scope: dict[str, Any] = {}
    path = "/lib/site-packages/torch/distributed/optim/zero_redundancy_optimizer.py"
    exec(compile(code, path, "exec"), scope)
    exec(compile("build()\n", "/scripts/train.py", "exec"), {"build": scope["build"]})
    assert reads.places == ("train.py:1",)
