"""Every collective, dtype and size, over sockets and over shared memory."""

from __future__ import annotations

import pytest

from . import collective_cases as cases
from .fleet import run_ranks


@pytest.mark.parametrize("machines", [True, False], ids=["sockets", "shared_memory"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_collectives(size: int, machines: bool) -> None:
    run_ranks(size, cases.everything, machines=machines, timeout_s=170.0)


@pytest.mark.parametrize("size", [5, 6])
def test_reduction_tree_with_folded_ranks(size: int) -> None:
    run_ranks(size, cases.reductions, timeout_s=170.0)
