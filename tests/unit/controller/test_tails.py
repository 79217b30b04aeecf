"""What the controller makes of ranks behind a gate: who goes back, and who is waited for."""

from __future__ import annotations

from tests.unit.controller.play import Stage
from tests.unit.controller.test_sources import stayer

from trainmover import controller
from trainmover.controller import sources
from trainmover.protocol import messages as m

IN_FRONT = m.Version(step=4, lineage=1)


def test_those_who_are_through_go_back_to_one_who_is_not() -> None:
    through = [stayer(rank, 5, previous=IN_FRONT, last_result=(1,)) for rank in (0, 2)]
    agreed = sources.agree((*through, stayer(1, 4)))
    assert (agreed.target, agreed.result, agreed.contradiction) == (IN_FRONT, (), "")


def test_one_held_at_the_gate_is_reason_enough() -> None:
    agreed = sources.agree((stayer(0, 5, previous=IN_FRONT), stayer(1, 4, has_entered=True)))
    assert agreed.target == IN_FRONT


def test_where_all_are_through_nobody_goes_back() -> None:
    agreed = sources.agree((stayer(0, 5, previous=IN_FRONT), stayer(1, 5, previous=IN_FRONT)))
    assert agreed.target.step == 5


def test_one_that_kept_nothing_is_not_gone_past() -> None:
    ahead = (stayer(0, 5, previous=IN_FRONT), stayer(1, 5))
    held = sources.agree((*ahead, stayer(2, 4, has_entered=True)))
    assert held.target.step == 5
    assert sources.agree((*ahead, stayer(2, 4))).contradiction


def test_another_lineage_is_another_version() -> None:
    other = m.Version(step=4, lineage=3)
    agreed = sources.agree((stayer(0, 5, previous=other), stayer(1, 4)))
    assert agreed.contradiction


def saving(stage: Stage) -> str:
    """Rank 2 says that it is behind a gate, and reports nothing."""
    name = stage.name(2)
    stage.silenced = lambda who, body: who == name and isinstance(body, m.Freeze)
    stage.exit(stage.name(1))
    return name


def freezes(stage: Stage) -> list[tuple[str, m.Freeze]]:
    told = [body for _, body in stage.sent if isinstance(body, m.ToWorker)]
    return [(each.incarnation, each.body) for each in told if isinstance(each.body, m.Freeze)]


def frozen(stage: Stage) -> int:
    return max(freeze.number for _, freeze in freezes(stage))


def config(**changes: float) -> controller.Config:
    names = tuple(f"m{index}" for index in range(5))
    return controller.Config(machine_names=names, standby_machines=1, **changes)  # type: ignore[arg-type]


def test_a_rank_that_saves_is_not_replaced() -> None:
    stage = Stage(config=config(report_timeout_s=5.0)).form()
    name = saving(stage)
    for _ in range(12):
        stage.worker(name, m.InTail(incarnation=name, number=frozen(stage)))
        stage.wait(1.0)
    assert stage.phase == "Freezing"
    told = [who for who, _ in freezes(stage)]
    assert told.count(stage.name(0)) >= 2  # who has reported goes on hearing something
    stage.silenced = lambda who, body: False
    actor = stage.actors[name]
    stage.worker(name, actor.report(frozen(stage), 4))
    stage.wait(2.0)
    assert stage.phase == "Training"
    assert stage.name(2) == name


def test_one_that_says_nothing_more_is() -> None:
    stage = Stage(config=config(report_timeout_s=5.0)).form()
    name = saving(stage)
    stage.worker(name, m.InTail(incarnation=name, number=frozen(stage)))
    stage.wait(30.0)
    assert stage.name(2) != name


def test_one_that_never_ends_is() -> None:
    stage = Stage(config=config(report_timeout_s=5.0, tail_timeout_s=20.0)).form()
    name = saving(stage)
    for _ in range(40):
        if name in stage.actors:
            stage.worker(name, m.InTail(incarnation=name, number=frozen(stage)))
        stage.wait(1.0)
    assert stage.name(2) != name
