"""`controller.do_standbys_rehearse=false`: standbys are processes until there is a loss."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import messages as m

NAMES = ("m0", "m1", "m2", "m3", "m4")


def stage_without_rehearsal() -> Stage:
    config = controller.Config(machine_names=NAMES, standby_machines=1, do_standbys_rehearse=False)
    stage = Stage(config=config).form()
    # The stage lets standbys say that they are ready though nobody has asked them to be.
    (spare,) = [w for w in stage.state.workers.values() if w.machine == NAMES[-1]]
    workers = {**stage.state.workers, spare.incarnation: replace(spare, readiness=None)}
    stage.state = replace(stage.state, workers=workers)
    return stage


def orders(stage: Stage) -> list[m.BecomeStandby]:
    inner = [body.body for _, body in stage.sent if isinstance(body, m.ToWorker)]
    return [body for body in inner if isinstance(body, m.BecomeStandby)]


def test_nothing_is_built_while_all_is_well() -> None:
    stage = stage_without_rehearsal()
    stage.wait(3)
    assert not orders(stage)


def test_a_loss_makes_the_standby_build_main_and_it_takes_the_rank() -> None:
    stage = stage_without_rehearsal()
    stage.kill_machine("m1")
    assert orders(stage)
    stage.gate()
    stage.wait(3)
    assert stage.state.closed[-1].kind == "standby"
    assert stage.state.membership is not None
    assert stage.state.membership.members[1].machine == "m4"
