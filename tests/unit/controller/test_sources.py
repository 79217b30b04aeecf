"""Version and sources: the arithmetic behind a plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainmover.controller import sources
from trainmover.protocol import messages as m


def report(name: str, step: int, **changes: object) -> m.Report:
    known = {"incarnation": name, "number": 2, "generation": 1, "rank": 0}
    version = m.Version(step=step, lineage=1)
    return m.Report(**{**known, "applied": version, **changes})


def stayer(rank: int, step: int, **changes: object) -> sources.Stayer:
    known = report(f"w{rank}", step, **changes)
    return sources.stayer(rank, known, 1, m.Version(step=0), "all")


def test_all_at_one_version_need_no_result() -> None:
    agreed = sources.agree((stayer(0, 4), stayer(1, 4)))
    assert agreed.target.step == 4 and agreed.result == () and agreed.contradiction == ""


def test_the_highest_applied_version_counts_and_brings_the_gates_result() -> None:
    ahead = stayer(0, 5, last_result=(1, 2))
    agreed = sources.agree((ahead, stayer(1, 4, has_entered=True)))
    assert agreed.target.step == 5 and agreed.result == (1, 2)


def test_one_behind_that_has_not_entered_is_a_contradiction() -> None:
    assert "rank 1" in sources.agree((stayer(0, 5), stayer(1, 4))).contradiction
    two = sources.agree((stayer(0, 5), stayer(1, 3, has_entered=True)))
    assert two.contradiction


def test_equal_steps_of_two_lineages_are_a_contradiction() -> None:
    other = m.Version(step=5, lineage=3)
    agreed = sources.agree((stayer(0, 5), stayer(1, 5, applied=other, has_entered=True)))
    assert agreed.contradiction


def test_a_prepared_member_of_a_journaled_commit_is_at_its_target() -> None:
    known = report("w0", 9, generation=0, rank=-1, prepared_number=1)
    at = sources.stayer(0, known, 1, m.Version(step=3, lineage=1), "all")
    assert at.version == m.Version(step=3, lineage=1)


def test_own_leaves_never_come_from_a_gate_copy() -> None:
    target = m.Version(step=4, lineage=1)
    gate_copy = m.Held(owner_rank=2, version=target, is_final=False)
    final = m.Held(owner_rank=2, version=target, is_final=True)
    none = sources.choose({2: "all"}, (stayer(0, 4, personal=(gate_copy,)),), target)
    assert "personal state of step 4" in none.missing[0]
    both = (stayer(0, 4, personal=(gate_copy,)), stayer(1, 4, personal=(final,)))
    (source,) = sources.choose({2: "all"}, both, target).sources
    assert (source.bulk_from, source.own_from) == ("w0", "w1")


def test_cover_takes_the_one_rank_that_explains_everything() -> None:
    assert sources.vertex_cover(((0, 2), (1, 2), (2, 3))) == (2,)
    assert sources.vertex_cover(((0, 1),)) == (0,)
    assert sources.vertex_cover(()) == ()
    star = tuple((0, other) for other in range(1, 20))
    assert sources.vertex_cover(star) == (0,)


pair = st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda edge: edge[0] != edge[1])


@given(st.lists(pair, max_size=8))
def test_a_cover_touches_each_edge_and_is_no_larger_than_the_greedy_one(
    edges: list[tuple[int, int]],
) -> None:
    cover = sources.vertex_cover(tuple(edges))
    assert all(a in cover or b in cover for a, b in edges)
    assert len(cover) <= len({rank for edge in edges for rank in edge})
