"""Copies by fault domain: properties against brute force, reasons, and what they are worth."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.errors import ConfigError
from trainmover.topology.domains import (
    LEVELS,
    Domains,
    domains_of,
    is_outside,
    labels_of,
    members_by_domain,
    parse_topology,
)
from trainmover.topology.placement import (
    Placement,
    fatal_domains,
    place,
    recoverability,
    recoverability_bound,
    survives,
)

NAMES = st.sampled_from(["", "a", "b", "c"])


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Domains]:
    count = draw(st.integers(1, 9))
    return {
        f"m{index}": Domains(
            machine=f"m{index}", rack=draw(NAMES), switch=draw(NAMES), power=draw(NAMES)
        )
        for index in range(count)
    }


def nested(powers: int, switches: int, racks: int, machines: int) -> dict[str, Domains]:
    """A building: domains inside one another."""
    found: dict[str, Domains] = {}
    places = product(range(powers), range(switches), range(racks), range(machines))
    for index, (power, switch, rack, _) in enumerate(places):
        name = f"m{index}"
        found[name] = Domains(
            machine=name,
            rack=f"r{power}{switch}{rack}",
            switch=f"s{power}{switch}",
            power=f"p{power}",
        )
    return found


@given(clusters(), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=120, deadline=None)
def test_no_copy_shares_a_machine_and_one_is_outside_if_any_can_be(
    cluster: dict[str, Domains], copies: int, standbys: int
) -> None:
    holders = sorted(cluster)
    owners = holders[: max(1, len(holders) - standbys)]
    made = place(owners, holders, cluster, copies)
    assert set(made.places) == set(owners)
    for owner, held in made.places.items():
        assert owner not in held
        assert len(set(held)) == len(held) == min(copies, len(holders) - 1)
        could = any(is_outside(cluster[owner], cluster[name]) for name in holders)
        has = any(is_outside(cluster[owner], cluster[name]) for name in held)
        assert has == (could and copies > 0)
        if held and not has:
            assert any(owner in reason or "more" in reason for reason in made.reasons)


@given(clusters(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_any_loss_of_as_many_machines_as_there_are_copies_is_survived(
    cluster: dict[str, Domains], copies: int
) -> None:
    made = place(sorted(cluster), sorted(cluster), cluster, copies)
    fewest = min(len(held) for held in made.places.values())
    for lost in combinations(sorted(cluster), fewest):
        assert survives(made.places, frozenset(lost))


@given(clusters(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_whole_domain_may_go_where_every_owner_has_a_copy_outside(
    cluster: dict[str, Domains], copies: int
) -> None:
    made = place(sorted(cluster), sorted(cluster), cluster, copies)
    fatal = fatal_domains(made.places, cluster)
    for (level, name), machines in members_by_domain(cluster).items():
        inside = [
            owner
            for owner in machines
            if all(cluster[held].at(level) == name for held in made.places[owner])
        ]
        assert ((level, name) in fatal) == bool(inside)
    has_far = all(
        any(is_outside(cluster[owner], cluster[name]) for name in held)
        for owner, held in made.places.items()
    )
    if has_far:
        assert fatal == ()


@given(clusters(), st.integers(1, 3), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_places_that_still_serve_are_kept(
    cluster: dict[str, Domains], copies: int, lost: int
) -> None:
    names = sorted(cluster)
    first = place(names, names, cluster, copies)
    left = [name for name in names if name != names[lost % len(names)]]
    if not left:
        return
    second = place(left, left, cluster, copies, first.places)
    for owner in left:
        gone = set(first.places[owner]) - set(left)
        moved = set(first.places[owner]) - set(second.places[owner]) - gone
        assert len(moved) <= 1, "one may give way to a copy that is far enough"
    again = place(left, left, cluster, copies, second.places)
    assert again.places == second.places


def test_two_racks_hold_one_copy_near_and_one_far() -> None:
    cluster = nested(2, 1, 1, 3)
    made = place(sorted(cluster), sorted(cluster), cluster, 2)
    for owner, held in made.places.items():
        powers = [cluster[name].power for name in held]
        assert sorted(power == cluster[owner].power for power in powers) == [False, True]
    assert made.reasons == () and fatal_domains(made.places, cluster) == ()


def test_load_is_shared_evenly() -> None:
    cluster = nested(2, 2, 2, 2)
    made = place(sorted(cluster), sorted(cluster), cluster, 2)
    load = dict.fromkeys(cluster, 0)
    for held in made.places.values():
        for name in held:
            load[name] += 1
    assert max(load.values()) - min(load.values()) <= 2


def test_what_can_not_be_had_is_said() -> None:
    unknown = {name: Domains(machine=name) for name in ("m0", "m1")}
    made = place(("m0", "m1"), ("m0", "m1"), unknown, 2)
    assert made.places == {"m0": ("m1",), "m1": ("m0",)}
    assert any("2 copies are wanted, 1 other" in reason for reason in made.reasons)
    assert any("fault domains are not known" in reason for reason in made.reasons)
    same = nested(1, 1, 2, 2)
    made = place(sorted(same), sorted(same), same, 1)
    assert made.reasons == ("m0, m1, m2, m3: no machine is outside switch s00, power p0",)
    assert place(("m0",), ("m0",), {}, 0).reasons[0].startswith("no copies are wanted")


def test_pairs_hold_each_others_copies() -> None:
    cluster = {f"m{index:02}": Domains(machine=f"m{index:02}") for index in range(16)}
    made = place(sorted(cluster), sorted(cluster), cluster, 1)
    assert all(made.places[held[0]] == (owner,) for owner, held in made.places.items())
    assert round(recoverability(made.places, 2), 3) == 0.933
    assert round(recoverability(made.places, 3), 3) == 0.8
    assert round(recoverability_bound(16, 2, 2), 3) == 0.933


def test_recoverability_is_what_counting_says() -> None:
    places = {"a": ("b",), "b": ("c",), "c": ("a",)}
    assert recoverability(places, 1) == 1.0
    assert recoverability(places, 2) == 0.0
    assert recoverability(places, 0) == 1.0
    assert recoverability({}, 3) == 1.0


def test_partners_in_one_rack_of_18_are_never_enough() -> None:
    """Facts: N = 8,192, two copies, a rack of 18 at random 0.98; inside the rack 0."""
    assert round(recoverability_bound(8192, 2, 18), 4) == 0.9813
    cluster = nested(1, 1, 2, 2)
    near = Placement(places={"m0": ("m1",), "m1": ("m0",), "m2": ("m3",), "m3": ("m2",)})
    assert ("rack", "r000") in fatal_domains(near.places, cluster)


@pytest.mark.timeout(30)
def test_thousands_of_machines_are_placed_in_a_moment() -> None:
    cluster = nested(4, 8, 4, 16)
    made = place(sorted(cluster), sorted(cluster), cluster, 2)
    assert made.reasons == () and len(made.places) == 2048
    again = place(sorted(cluster), sorted(cluster), cluster, 2, made.places)
    assert again.places == made.places
    unknown = {name: Domains(machine=name) for name in cluster}
    assert len(place(sorted(unknown), sorted(unknown), unknown, 2).reasons) == 1


# --------------------------------------------------------------------------- domains


def test_a_topology_file_and_labels_say_the_same() -> None:
    text = "# ours\nm0 rack=r1 switch=s1 power=p1\n\nm1 rack=r2  # spare\n"
    parsed = parse_topology(text)
    assert parsed["m0"] == Domains(machine="m0", rack="r1", switch="s1", power="p1")
    assert labels_of(parsed["m1"]) == (("rack", "r2"),)
    assert domains_of("m0", labels_of(parsed["m0"])) == parsed["m0"]
    assert len(LEVELS) == 3


@pytest.mark.parametrize(
    "text, told",
    [
        ("m0 rack=a\nm0 rack=b", "line 2: m0 is named twice"),
        ("m0 row=a", "line 1: expected rack=NAME"),
        ("m0 rack", "got 'rack'"),
    ],
)
def test_a_topology_file_that_is_wrong_names_the_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_topology(text)
