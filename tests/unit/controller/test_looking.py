"""Looks into storage: what a start waits for, and the last hope after a loss."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, hold, plan, say, settle, sharded, track

from trainmover import controller
from trainmover.controller.disks import arranged
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m

TIERS = (("checkpoint.directory", "/checkpoints"), ("checkpoint.local_directory", "/local"))


def part(machine: str, *ranks: int, folder: str = "") -> m.DiskPart:
    return m.DiskPart(machine=machine, folder=folder or machine, ranks=ranks)


def found(*parts: m.DiskPart, step: int = 20, lineage: int = 3) -> controller.Restored:
    return controller.Restored(
        name=f"step-{step}",
        version=m.Version(step=step, lineage=lineage),
        run_id="before",
        history=("before",),
        disks=parts,
    )


def waiting() -> Stage:
    """Two machines are up; nobody has said yet where disks are read."""
    stage = Stage(machines=2, standby=0, settings=TIERS, restored=controller.Unchosen())
    for name in stage.names:
        stage.hello(name)
    return stage


def looked() -> Stage:
    """The look that the start waits for is under way."""
    stage = waiting()
    for name in stage.names:
        say(stage, name)
    assert len(stage.looks) == 1
    return stage


def answer(stage: Stage, restored: controller.Restored | None, **fields: object) -> None:
    number = stage.looks[-1].number
    stage.feed(controller.StorageSeen(number=number, found=restored, **fields))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- the start


def test_a_start_waits_for_all_disks_and_then_for_the_choice() -> None:
    stage = waiting()
    assert stage.looks == [], "nobody knows where to ask"
    say(stage, "m0")
    assert stage.looks == []
    say(stage, "m1")
    (look,) = stage.looks
    assert look.is_start
    assert look.disks == (
        controller.Disk(machine="m0", host="m0", port=7),
        controller.Disk(machine="m1", host="m1", port=7),
    )
    stage.wait(5)
    assert len(stage.looks) == 1
    assert stage.phase == "Forming"
    answer(stage, found(part("m0", 0), part("m1", 1)))
    made = plan(stage)
    assert (made.restore, made.target, made.number) == ("step-20", at(20, 3), 4)
    assert [(p.machine, p.host, p.port) for p in made.disks] == [("m0", "m0", 7), ("m1", "m1", 7)]
    assert stage.phase == "Training"
    (start,) = stage.recorded(journal.StartChosen)
    assert (start.history, start.disks) == (("before",), (part("m0", 0), part("m1", 1)))


def test_a_machine_that_never_says_where_its_disk_is_read_is_asked_for_by_name() -> None:
    stage = waiting()
    say(stage, "m0")
    stage.wait(6)
    (look,) = stage.looks
    assert look.disks == (
        controller.Disk(machine="m0", host="m0", port=7),
        controller.Disk(machine="m1", host="", port=0),
    )


def test_ranks_go_to_the_machines_that_have_their_files() -> None:
    stage = looked()
    answer(stage, found(part("m0", 1, folder="m1"), part("m1", 0, folder="m0")))
    assert [member.machine for member in plan(stage).membership.members] == ["m1", "m0"]
    assert stage.recorded(journal.MachinesChosen)[-1].machines == ("m1", "m0")


def test_nothing_there_is_a_new_beginning_and_a_complaint_is_an_end() -> None:
    stage = looked()
    answer(stage, None)
    assert plan(stage).restore == ""
    assert stage.recorded(journal.StartChosen) == []
    stage = looked()
    answer(stage, None, code=exits.START_FAILED, reason="rank 1 is nowhere whole")
    assert stage.phase in {"Ending", "Ended"}
    (record,) = stage.recorded(journal.StoppedRecorded)
    assert (record.code, record.reason) == (exits.START_FAILED, "rank 1 is nowhere whole")


def test_a_disk_that_goes_while_it_is_looked_at_is_not_counted_on() -> None:
    stage = looked()
    first = stage.looks[-1].number
    stage.kill_machine("m1")
    answer(stage, found(part("m0", 0), part("m1", 1)))
    assert stage.recorded(journal.PlanRecorded) == []
    stage.agents["m1"] = "agent-m1-again"
    stage.hello("m1")
    say(stage, "m1")
    stage.wait(1)
    assert stage.looks[-1].number > first
    stage.feed(controller.StorageSeen(number=first, found=found(part("m1", 0, 1), step=99)))
    assert stage.recorded(journal.PlanRecorded) == [], "an old answer means nothing"
    answer(stage, found(part("m0", 0, 1), step=10))
    assert plan(stage).restore == "step-10"


def test_a_controller_that_dies_after_the_choice_keeps_to_its_plan() -> None:
    stage = looked()
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    answer(stage, found(part("m0", 0), part("m1", 1)))
    made = plan(stage)
    stage.silenced = lambda name, body: False
    stage.restored = None
    stage.crash()
    stage.wait(3)
    assert stage.phase == "Training"
    assert stage.state.kept.restore == made.restore
    assert [p.machine for p in stage.state.kept.restore_disks] == ["m0", "m1"]
    assert stage.state.kept.history == ("before",)


def test_an_end_of_the_job_while_it_is_looked_ends_it() -> None:
    stage = looked()
    stage.operator(m.StopRequest(request="1", mode="now"))
    answer(stage, found(part("m0", 0), part("m1", 1)))
    assert stage.recorded(journal.PlanRecorded) == []
    assert stage.phase in {"Ending", "Ended"}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), "abc"),
        ((part("a", 0, 1), part("b", 2, 3), part("c", 4, 5)), "abc"),
        ((part("c", 0, 1), part("a", 2, 3), part("b", 4, 5)), "cab"),
        ((part("b", 0), part("a", 1)), "abc"),
        ((part("x", 0, 1), part("c", 2, 3)), "acb"),
        ((part("a", 0, 1, 2, 3, 4, 5),), "abc"),
    ],
)
def test_who_has_most_of_a_block_of_ranks_plays_it(
    parts: tuple[m.DiskPart, ...], expected: str
) -> None:
    assert "".join(arranged(("a", "b", "c"), 2, parts)) == expected


# --------------------------------------------------------------------------------- the last hope


def lost() -> Stage:
    """A snapshot was complete, no commit was heard of, and a rank's state is gone for good."""
    stage = sharded(settings=TIERS)
    settle(stage)
    hold(stage, at(2))
    stage.wait(2)
    assert stage.state.kept.was_complete
    for name in stage.names:
        say(stage, name)
    stage.gate(2)
    stage.exit(stage.name(2))
    stage.wait(8)
    return stage


def test_storage_is_looked_into_before_a_job_gives_up() -> None:
    stage = lost()
    (look,) = stage.looks
    assert not look.is_start
    assert stage.phase == "Freezing"
    assert stage.recorded(journal.StoppedRecorded) == []
    answer(stage, found(part("m0", 0), part("m3", 1, 2, 3), step=2, lineage=1))
    made = plan(stage)
    assert (made.restore, made.target, made.is_fresh_start) == ("step-2", at(2), True)
    assert [p.machine for p in made.disks] == ["m0", "m3"]
    assert stage.phase == "Training"
    (record,) = stage.recorded(journal.CheckpointKept)
    assert (record.number, record.name) == (0, "step-2")


def test_nothing_found_is_the_end_with_both_reasons() -> None:
    stage = lost()
    answer(stage, None, reason="/checkpoints is empty")
    (record,) = stage.recorded(journal.StoppedRecorded)
    assert record.code == exits.CANNOT_RESTORE
    assert "no live replica" in record.reason
    assert "/checkpoints is empty" in record.reason


def test_no_answer_is_waited_for_no_longer_than_a_load_may_take() -> None:
    stage = sharded(settings=(*TIERS, ("checkpoint.load_timeout_s", "30.0")))
    settle(stage)
    hold(stage, at(2))
    stage.wait(2)
    for name in stage.names:
        say(stage, name)
    stage.gate(2)
    stage.exit(stage.name(2))
    stage.wait(60)
    assert len(stage.looks) == 1
    assert stage.ended is not None
    assert stage.ended.code == exits.CANNOT_RESTORE


def test_what_was_gone_back_from_is_never_taken() -> None:
    stage = lost()
    stage.feed(
        controller.StorageSeen(
            number=stage.looks[-1].number,
            found=found(step=2, lineage=1),
        )
    )
    line = stage.looks[-1].left
    assert line == ()
    stage.wait(2)
    stage.gate(2)
    stage.exit(stage.name(1))
    stage.wait(8)
    assert plan(stage).restore == "step-2", "it is known by now"
    assert len(stage.looks) == 1


def test_without_storage_nobody_looks() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.wait(2)
    for name in stage.names:
        say(stage, name)
    stage.gate(2)
    stage.exit(stage.name(2))
    stage.wait(10)
    assert stage.looks == []
    assert stage.ended is not None
    assert stage.ended.code == exits.CANNOT_RESTORE


# --------------------------------------------------------------------------------- what is left


def begun(*parts: m.DiskPart) -> Stage:
    """A run that has begun from step 20 of another one; nothing of its own is kept yet."""
    settings = (*TIERS, ("snapshot.cadence", "never"))
    stage = Stage(machines=2, standby=1, settings=settings, restored=controller.Unchosen())
    for name in stage.names:
        stage.hello(name)
        say(stage, name)
    answer(stage, found(*parts))
    track(stage)
    assert stage.phase == "Training"
    return stage


def test_without_the_disk_that_alone_has_a_part_an_older_one_is_taken() -> None:
    stage = begun(part("m0", 0), part("m1", 1))
    stage.gate(22)
    stage.kill_machine("m1")
    stage.wait(25)
    look = stage.looks[-1]
    assert (look.is_start, look.history, look.begun_at) == (False, ("before",), at(20, 3))
    assert [disk.machine for disk in look.disks] == ["m0", "m2"]
    answer(stage, found(part("m0", 0, 1), step=10, lineage=2))
    made = plan(stage)
    assert (made.restore, made.target, made.is_fresh_start) == ("step-10", at(10, 2), True)
    assert stage.phase == "Training"
    # What it has left with that is left for good, whoever brings it back.
    stage.hello("m1")
    say(stage, "m1")
    stage.gate(11)
    stage.kill_machine("m0")
    stage.wait(25)
    assert stage.looks[-1].left == ((10, made.number),)
    answer(stage, found(part("m1", 0, 1)))
    assert plan(stage) == made


def test_a_machine_that_is_back_in_time_is_waited_for() -> None:
    stage = begun(part("m0", 0), part("m1", 1))
    stage.exit(stage.name(0))
    stage.linked.discard("m1")
    stage.feed(controller.AgentUnlinked(machine="m1"))
    stage.wait(4)
    assert len(stage.looks) == 1, "it may come back"
    stage.hello("m1")
    stage.wait(4)
    assert (plan(stage).restore, plan(stage).kind, len(stage.looks)) == ("step-20", "unplanned", 1)


def test_a_disk_that_comes_late_is_looked_at_too_and_a_last_one_is_named() -> None:
    stage = begun(part("m0", 0), part("m1", 1))
    stage.gate(22)
    stage.kill_machine("m1")
    stage.wait(25)
    answer(stage, None, reason="nothing older")
    assert stage.phase == "Freezing", "m1 may be booting"
    stage.agents["m1"] = "agent-m1-again"
    stage.hello("m1")
    say(stage, "m1")
    stage.wait(2)
    assert len(stage.looks) == 3, "is it the disk that was there before?"
    answer(stage, found(part("m0", 0), part("m1", 1)))
    stage.wait(20)
    assert (plan(stage).kind, plan(stage).restore) == ("unplanned", "step-20")
    stage.gate(22)
    stage.kill_machine("m1")
    stage.wait(25)
    answer(stage, None, reason="nothing older")
    stage.wait(60)
    (record,) = stage.recorded(journal.StoppedRecorded)
    assert record.code == exits.CANNOT_RESTORE
    assert "parts of step-20 were on disks that can't be counted on (m1)" in record.reason
    assert "nothing older" in record.reason


def test_a_controller_that_dies_over_the_choice_keeps_to_it() -> None:
    stage = begun(part("m0", 0), part("m1", 1))
    stage.gate(22)
    stage.kill_machine("m1")
    stage.wait(25)
    answer(stage, found(part("m0", 0, 1), step=10, lineage=2))
    assert stage.state.kept.durable is not None
    stage.restored = None
    stage.crash()
    stage.wait(3)
    kept = stage.state.kept
    assert (kept.base, kept.begun_at, kept.history) == (at(10, 2), at(20, 3), ("before",))


def test_a_load_whose_agent_is_another_by_now_is_tried_once_more_where_all_live() -> None:
    """Nobody is lost, and nobody can go on: no reason to blame connections."""
    stage = begun(part("m0", 1), part("m1", 0))
    for member in stage.members():
        actor = stage.actors[member.incarnation]
        actor.is_building, actor.identity = True, ""
    stage.agents["m1"] = "agent-m1-again"
    stage.hello("m1")
    say(stage, "m1")
    stage.break_to(stage.name(1))
    stage.wait(15)
    assert len(stage.looks) == 2
    answer(stage, found(part("m0", 1), part("m1", 0)))
    stage.wait(2)
    made = plan(stage)
    assert (made.kind, made.restore, made.joiners) == ("unplanned", "step-20", ())
    assert stage.phase == "Training"
