"""Each invariant finds the shortest history that breaks it, and is silent about the right one."""

from __future__ import annotations

import msgspec
import pytest

from trainmover.checks import (
    Applied,
    AttemptBegan,
    Checker,
    Ended,
    GateEntered,
    GatePassed,
    JoinerLoaded,
    Observation,
    PreparedAt,
    Reported,
    RunsIn,
    SnapshotLoaded,
    StepReached,
)
from trainmover.protocol.journal import (
    AbortRecorded,
    AnyRecord,
    CommitRecorded,
    IncidentOpened,
    PlanRecorded,
    TargetFixed,
    TermTaken,
)
from trainmover.protocol.messages import Plan, Version
from trainmover.topology import Member, Membership

NAMES = ("m0.0.a", "m1.0.a", "m2.0.a")
T0 = Version(step=0, lineage=0)
T1 = Version(step=1, lineage=1)
WARDS_OF_0 = ((1, 1), (2, 1))


def plan(number: int, base: int, target: Version = T0, names: tuple[str, ...] = NAMES) -> Plan:
    members = tuple(
        Member(rank=rank, incarnation=name, machine=name[:2], host="h", port=1)
        for rank, name in enumerate(names)
    )
    return Plan(
        number=number,
        kind="unplanned",
        base_generation=base,
        target=target,
        membership=Membership(generation=number, members=members),
    )


def formed() -> Checker:
    checker = Checker()
    for record in (TermTaken(term=1), PlanRecorded(plan=plan(1, 0)), CommitRecorded(number=1)):
        assert checker.append(record) == []
    for name in NAMES:
        assert checker.observe(RunsIn(incarnation=name, generation=1)) == []
    return checker


def entered(rank: int, step: int = 0, **more: object) -> GateEntered:
    held = tuple((owner, step + 1) for owner in range(3) if owner != rank)
    known: dict[str, object] = {"is_tainted": False, "held": held}
    known |= {"generation": 1, "step": step, "rank": rank, "incarnation": NAMES[rank]}
    return GateEntered(**(known | more))  # type: ignore[arg-type]


def passed(rank: int, generation: int = 1, step: int = 0) -> GatePassed:
    return GatePassed(incarnation=NAMES[rank], generation=generation, step=step)


def reached(rank: int, step: int, digest: int = 0) -> StepReached:
    return StepReached(incarnation=NAMES[rank], generation=1, step=step, rank=rank, digest=digest)


def found(checker: Checker, *events: Observation | AnyRecord) -> list[str]:
    numbers = []
    for event in events:
        is_record = not isinstance(event, Observation)
        violations = checker.append(event) if is_record else checker.observe(event)  # type: ignore[arg-type]
        numbers += [violation.invariant for violation in violations]
    return numbers


def test_an_ordinary_step_violates_nothing() -> None:
    checker = formed()
    events = [entered(rank) for rank in range(3)] + [passed(rank) for rank in range(3)]
    events += [reached(rank, 1) for rank in range(3)]
    assert found(checker, *events) == []


def test_i1_nobody_passes_a_gate_that_somebody_has_not_entered() -> None:
    assert found(formed(), entered(0), entered(1), passed(0)) == ["I1"]


def test_i1_nobody_enters_with_invented_values() -> None:
    assert found(formed(), entered(0, is_tainted=True)) == ["I1"]


def test_i2_versions_of_one_generation_differ_by_one_and_the_lower_has_entered() -> None:
    assert found(formed(), reached(0, 1)) == ["I2", "I2"]
    checker = formed()
    everybody = [entered(rank) for rank in range(3)]
    assert found(checker, *everybody, reached(0, 1)) == []
    assert found(checker, reached(0, 2)) == ["I2", "I2"]


def test_i2_the_dead_are_not_compared() -> None:
    checker = formed()
    gone = [Ended(incarnation=name) for name in NAMES[1:]]
    assert found(checker, *gone, reached(0, 1)) == []


def test_i3_nothing_passes_after_the_report() -> None:
    everybody = [entered(rank) for rank in range(3)]
    report = Reported(incarnation=NAMES[0], number=2)
    assert found(formed(), *everybody, report, passed(0)) == ["I3"]


def test_i3_only_the_plan_applies_after_the_report() -> None:
    report = Reported(incarnation=NAMES[0], number=2)
    applied = Applied(incarnation=NAMES[0], lineage=1, step=0, result=(1,))
    by_plan = Applied(incarnation=NAMES[0], lineage=1, step=0, result=(1,), by_plan=2)
    assert found(formed(), report, by_plan) == []
    assert found(formed(), report, applied) == ["I3"]


def test_i4_prepared_is_at_the_target() -> None:
    checker = formed()
    record = PlanRecorded(plan=plan(2, 1, T1))
    right = PreparedAt(incarnation=NAMES[0], number=2, applied=T1)
    wrong = PreparedAt(incarnation=NAMES[1], number=2, applied=T0)
    assert found(checker, record, right, wrong) == ["I4"]


def test_i4_a_planned_target_may_come_after_the_first_rank_is_prepared() -> None:
    checker = formed()
    early = PreparedAt(incarnation=NAMES[0], number=2, applied=T0)
    offer = PlanRecorded(plan=plan(2, 1, Version(step=-1)))
    fixed = TargetFixed(number=2, target=T1)
    commit = CommitRecorded(number=2)
    assert found(checker, offer, early, fixed, commit) == []
    assert found(checker, RunsIn(incarnation=NAMES[0], generation=2)) == ["I4"]


@pytest.mark.parametrize(
    "order", [(CommitRecorded, AbortRecorded), (AbortRecorded, CommitRecorded)]
)
def test_i5_a_number_is_committed_or_aborted(order: tuple[type, type]) -> None:
    checker = formed()
    records = [
        kind(number=2) if kind is CommitRecorded else kind(number=2, reason="") for kind in order
    ]
    assert found(checker, PlanRecorded(plan=plan(2, 1)), *records) == ["I5"]


def test_i5_nobody_runs_uncommitted_or_unasked() -> None:
    checker = formed()
    record = PlanRecorded(plan=plan(2, 1))
    assert found(checker, record, RunsIn(incarnation=NAMES[0], generation=2)) == ["I5"]
    stranger = RunsIn(incarnation="m9.0.z", generation=1)
    assert found(formed(), stranger) == ["I5"]


def test_i6_numbers_grow_and_one_is_open() -> None:
    opened = IncidentOpened(number=2, base_generation=1, reason="")
    second = IncidentOpened(number=3, base_generation=1, reason="")
    abort = AbortRecorded(number=2, reason="")
    assert found(formed(), opened, second) == ["I6"]
    assert found(formed(), opened, abort, second) == []
    assert found(formed(), PlanRecorded(plan=plan(2, 1)), PlanRecorded(plan=plan(2, 1))) == ["I6"]


def test_i6_a_plan_builds_on_the_committed_generation() -> None:
    assert found(formed(), PlanRecorded(plan=plan(2, 0))) == ["I6"]


def test_i7_one_contribution_per_gate() -> None:
    assert found(formed(), entered(0), entered(0)) == ["I7"]


def test_i8_who_enters_holds_its_wards_personal_state() -> None:
    assert found(formed(), entered(0, held=WARDS_OF_0)) == []
    assert found(formed(), entered(0, held=WARDS_OF_0[:1])) == ["I8"]


def test_i9_a_joiner_is_of_one_version() -> None:
    checker = formed()
    found(checker, PlanRecorded(plan=plan(2, 1, T1)))
    mixed = JoinerLoaded(incarnation="j", number=2, bulk=T1, own=T0, shared=T1)
    whole = JoinerLoaded(incarnation="j", number=2, bulk=T1, own=T1, shared=T1)
    assert found(checker, whole) == []
    assert found(checker, mixed) == ["I9"]


def rolled_back() -> Checker:
    """Generation 2 began at step 1 of generation 1; steps behind it count no more."""
    checker = formed()
    back = msgspec.structs.replace(plan(2, 1, target=T1), is_rollback=True)
    for record in (PlanRecorded(plan=back), CommitRecorded(number=2)):
        assert checker.append(record) == []
    return checker


def test_i9_everyone_loads_the_version_of_the_plan() -> None:
    checker = formed()
    checker.append(PlanRecorded(plan=msgspec.structs.replace(plan(2, 1, T1), is_rollback=True)))
    fine = SnapshotLoaded(incarnation=NAMES[0], number=2, version=T1)
    assert checker.observe(fine) == []
    other = SnapshotLoaded(incarnation=NAMES[0], number=2, version=Version(step=1, lineage=0))
    assert found(checker, other) == ["I9"]


def test_i13_nothing_of_a_time_line_that_was_left_is_loaded() -> None:
    checker = rolled_back()
    void = Version(step=3, lineage=1)
    checker.append(PlanRecorded(plan=msgspec.structs.replace(plan(3, 2, void), is_rollback=True)))
    late = SnapshotLoaded(incarnation=NAMES[0], number=3, version=void)
    assert found(checker, late) == ["I13"]
    assert not checker.is_void(T1) and not checker.is_void(Version(step=3, lineage=2))


def test_a_roll_back_lowers_the_step_of_all() -> None:
    checker = formed()
    checker.steps = dict.fromkeys(NAMES, (1, 5))
    back = msgspec.structs.replace(plan(2, 1, target=T1), is_rollback=True)
    for record in (PlanRecorded(plan=back), CommitRecorded(number=2)):
        assert checker.append(record) == []
    for name in NAMES:
        assert checker.observe(PreparedAt(incarnation=name, number=2, applied=T1)) == []
        assert checker.observe(RunsIn(incarnation=name, generation=2)) == []
    assert set(checker.steps.values()) == {(2, 1)}


def test_i10_one_result_for_all() -> None:
    events = [
        Applied(incarnation=NAMES[rank], lineage=1, step=0, result=(rank,)) for rank in (0, 1)
    ]
    assert found(formed(), *events) == ["I10"]


def test_i11_one_generation_passes() -> None:
    checker = formed()
    found(checker, PlanRecorded(plan=plan(2, 1)), CommitRecorded(number=2))
    for rank in range(3):
        found(checker, entered(rank), entered(rank, generation=2))
    assert found(checker, passed(0, generation=2), passed(1, generation=1)) == ["I11"]


def test_p2_numbers_are_those_of_the_uninterrupted_run() -> None:
    checker = Checker(reference=[[10, 20, 30]])
    assert found(checker, reached(1, 0, digest=20)) == []
    assert found(checker, reached(1, 0, digest=21)) == ["P2"]


def test_ranks_at_different_bucket_layouts_would_call_different_collectives() -> None:
    checker = formed()

    def began(rank: int, step: int, layout: int) -> list[str]:
        event = AttemptBegan(incarnation=NAMES[rank], generation=1, step=step, layout=layout)
        return [found.invariant for found in checker.observe(event)]

    assert began(0, 0, 0) == began(1, 0, 0) == began(0, 1, 1) == []
    assert began(1, 1, 2) == ["I14"]
