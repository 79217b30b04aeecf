"""Role classes are found from shapes and sequences, never from rank numbers."""

from __future__ import annotations

import pytest
import torch
from tests.unit.rehearsal.shapes import reduce, stage
from torch import nn

from trainmover.communicator.call import Call, GroupPlace, Kind
from trainmover.rehearsal.calls import Describer
from trainmover.rehearsal.classes import class_digest, fingerprint, state_digest
from trainmover.state.inventory import Inventory


def digests(count: int, rows: int = 2) -> list[str]:
    return [class_digest("s", [stage(rank, count, rows)]) for rank in range(count)]


@pytest.mark.parametrize("count", [4, 5, 8])
def test_equal_stages_are_first_middle_and_last(count: int) -> None:
    found = digests(count)
    assert len(set(found)) == 3
    assert len(set(found[1:-1])) == 1


def test_equal_shapes_with_other_collectives_are_another_class() -> None:
    plain = class_digest("s", [[reduce(8)]])
    assert class_digest("s", [[reduce(8), reduce(8)]]) != plain
    assert class_digest("s", [[reduce(8, size=2)]]) != plain
    assert class_digest("other shapes", [[reduce(8)]]) != plain
    assert class_digest("s", [[reduce(8)], [reduce(8)]]) != plain
    assert class_digest("s", [[reduce(8)]]) == plain


def test_state_counts_by_shape_and_not_by_name() -> None:
    def state(name: str, width: int) -> str:
        return state_digest(Inventory({"model": nn.ModuleDict({name: nn.Linear(3, width)})}))

    assert state("stage0", 4) == state("stage1", 4)
    assert state("stage0", 4) != state("stage0", 5)


def test_a_fingerprint_changes_with_each_thing_it_binds() -> None:
    base = fingerprint(b"script", ("--a",), 4, 1)
    others = [
        fingerprint(b"script2", ("--a",), 4, 1),
        fingerprint(b"script", ("--b",), 4, 1),
        fingerprint(b"script", ("--a",), 8, 1),
        fingerprint(b"script", ("--a",), 4, 2),
    ]
    assert base not in others
    assert len(set(others)) == 4
    assert fingerprint(b"script", ("--a",), 4, 1) == base


def call(kind: Kind, ranks: tuple[int, ...], rank: int, root: int = 0, name: str = "g") -> Call:
    made = Call(kind, GroupPlace(name, 1, ranks, rank, 60.0), [], [torch.zeros(3)], None)
    made.root = root
    return made


def test_groups_have_no_names_and_peers_no_numbers() -> None:
    here = Describer(1).describe(call(Kind.RECV, (0, 1, 2, 3), 1, root=2, name="pp_a"))
    there = Describer(1).describe(call(Kind.RECV, (4, 5, 6, 7), 2, root=3, name="pp_b"))
    assert here == there
    assert here.peer == "next"
    root = Describer(1).describe(call(Kind.BROADCAST, (0, 1), 0))
    other = Describer(1).describe(call(Kind.BROADCAST, (0, 1), 1))
    assert root == other


def test_a_group_inside_one_machine_does_not_cross() -> None:
    describer = Describer(2)
    assert not describer.describe(call(Kind.ALL_REDUCE, (2, 3), 0)).crosses
    assert describer.describe(call(Kind.ALL_REDUCE, (1, 2), 0)).crosses


def test_sizes_that_depend_on_data_are_left_open() -> None:
    described = Describer(1).describe(call(Kind.ALL_TO_ALL, (0, 1), 0))
    assert described.shapes == ((-1,),)
