"""Who reads the rank while `main` builds: named outside known objects, silent otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
