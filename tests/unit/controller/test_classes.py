"""Role classes in the controller: keepers, a standby's walk, and how long it waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from tests.unit.controller.actor import Actor
from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import messages as m

CLASSES = ("first", "middle", "middle", "last")


@dataclass
class Recording(Stage):
    """A stage whose members record, and whose standbys rehearse what they are told."""

    classes: tuple[str, ...] = CLASSES
    fails_to_store: str = ""
    orders: list[m.BecomeStandby] = field(default_factory=list)
    kept: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)

    def _start(self) -> None:
        settings = (("rehearsal.answers", "recorded"),)
        self.spec = msgspec.structs.replace(self.spec, settings=settings)
        super()._start()

    def tell_classes(self, count: int = 4) -> None:
        """Members have their first iteration behind them."""
        for member in self.members()[:count]:
            body = m.RoleClass(
                incarnation=member.incarnation,
                rank=member.rank,
                fingerprint="f",
                digest=self.classes[member.rank],
                bytes=10,
            )
            self.worker(member.incarnation, body)

    def _introduce(self, machine: str) -> None:
        for actor in [a for a in self.actors.values() if a.machine == machine]:
            self.worker(actor.incarnation, actor.up())

    def _to_worker(self, actor: Actor, body: m.Message) -> None:
        match body:
            case m.KeepRecording(role_class=digest, is_keeper=is_keeper):
                self.kept.setdefault(digest, []).append((actor.incarnation, is_keeper))
                if is_keeper:
                    stored = m.RecordingStored(
                        incarnation=actor.incarnation,
                        fingerprint="f",
                        role_class=digest,
                        file=f"/store/{digest}",
                        bytes=10,
                        reason=self.fails_to_store,
                    )
                    self._say(actor, stored)
            case m.BecomeStandby():
                self.orders.append(body)
                classes = tuple(each.role_class for each in body.rehearsals)
                ready = msgspec.structs.replace(actor.ready(body.as_rank), classes=classes)
                self._say(actor, ready)
            case _:
                super()._to_worker(actor, body)

    def ready(self) -> list[str]:
        """Standbys that can join at once."""
        views = controller.status(self.state, self.now).standbys
        return [view.machine for view in views if view.is_ready]


def formed(**fields: object) -> Recording:
    """A stage that trains; nobody has told its class."""
    stage = Recording(**fields)  # type: ignore[arg-type]
    for name in stage.names:
        stage.hello(name)
    return stage


def test_a_standby_waits_and_walks_through_every_class_the_most_common_last() -> None:
    stage = formed()
    stage.gate(2)
    stage.wait(3)
    assert stage.orders == []
    stage.tell_classes(3)
    assert stage.orders == []
    stage.tell_classes()
    (order,) = stage.orders
    walked = [each.role_class for each in order.rehearsals]
    assert sorted(walked) == ["first", "last", "middle"]
    assert walked[-1] == "middle"
    assert order.as_rank == order.rehearsals[-1].as_rank == 1
    assert order.rehearsals[-1].ranks == (1, 2)
    assert order.rehearsals[-1].file == "/store/middle"
    assert stage.ready() == ["m4"]


def test_the_lowest_rank_of_a_class_keeps_its_recording_and_nobody_else() -> None:
    stage = formed()
    stage.gate()
    stage.tell_classes()
    assert stage.kept["middle"] == [(stage.name(1), True), (stage.name(2), False)]
    assert stage.kept["first"] == [(stage.name(0), True)]


def test_a_loss_ends_the_wait() -> None:
    stage = formed()
    stage.gate()
    stage.kill_machine("m2")
    stage.wait(2)
    assert [order.rehearsals for order in stage.orders[:1]] == [()]
    assert stage.phase == "Training"
    assert stage.machine(2) == "m4"


def test_the_wait_is_bounded() -> None:
    config = controller.Config(
        machine_names=tuple(f"m{index}" for index in range(5)),
        standby_machines=1,
        recording_wait_s=20,
    )
    stage = formed(config=config)
    stage.gate()
    stage.wait(15)
    assert stage.orders == []
    stage.wait(10)
    assert stage.orders[0].rehearsals == ()
    assert stage.ready() == ["m4"]


def test_a_recording_that_could_not_be_kept_means_loop_back() -> None:
    stage = formed(classes=("all",) * 4, fails_to_store="disk full")
    stage.gate()
    stage.tell_classes()
    assert stage.orders[0].rehearsals == ()


def test_a_restarted_controller_is_told_again() -> None:
    stage = formed()
    stage.gate()
    stage.tell_classes()
    stage.crash()
    stage.tell_classes()
    view = controller.status(stage.state, stage.now)
    assert {each.digest: each.ranks for each in view.classes} == {
        "first": (0,),
        "middle": (1, 2),
        "last": (3,),
    }


def test_the_standby_built_as_the_lost_class_is_preferred() -> None:
    stage = formed(standby=2)
    stage.gate()
    stage.tell_classes()
    first, second = (f"m{index}" for index in (4, 5))
    names = {actor.machine: actor for actor in stage.actors.values() if actor.rank < 0}
    for machine, classes in ((first, ("first", "middle")), (second, ("middle", "first"))):
        actor = names[machine]
        body = msgspec.structs.replace(actor.ready(0), classes=classes, identity="other")
        stage.worker(actor.incarnation, body)
    stage.kill_machine("m0")
    stage.wait(2)
    assert stage.machine(0) == second


def test_the_incident_names_the_classes() -> None:
    stage = formed()
    stage.gate()
    stage.tell_classes()
    stage.kill_machine("m1")
    stage.wait(2)
    stage.gate()
    stage.wait(4)
    (report,) = stage.state.closed
    assert [role.role_class for role in report.roles] == list(CLASSES)


def test_a_recorded_rehearsal_needs_no_other_rank_of_the_lost_class_to_compare_with() -> None:
    stage = formed()
    stage.gate()
    stage.tell_classes()
    standby = next(actor for actor in stage.actors.values() if actor.rank < 0)
    body = msgspec.structs.replace(
        standby.ready(0), classes=("middle",), answers="recorded", sequence_digest="another order"
    )
    stage.worker(standby.incarnation, body)
    stage.kill_machine("m1")
    stage.wait(2)
    assert stage.machine(1) == "m4"


# --------------------------------------------------------------------------- several per machine

PAIRS = ("up", "down", "up", "down")


def pairs(**fields: object) -> Recording:
    """Two machines and a standby with two workers each; everybody has told its class."""
    stage = formed(machines=2, standby=1, workers_per_machine=2, classes=PAIRS, **fields)
    stage.gate()
    stage.tell_classes()
    return stage


def test_workers_of_a_standby_machine_rehearse_together() -> None:
    first, second = pairs().orders
    assert [each.role_class for each in (*first.rehearsals, *second.rehearsals)] == ["up", "down"]
    assert (first.as_rank, second.as_rank) == (0, 1)
    (names,) = {each.neighbours for order in (first, second) for each in order.rehearsals}
    assert len(names) == 2


def test_kinds_of_machines_are_walked_through_in_one_order() -> None:
    classes = ("first", "same", "middle", "same", "middle", "same", "last", "same")
    stage = formed(machines=4, standby=1, workers_per_machine=2, classes=classes)
    stage.gate()
    stage.tell_classes(8)
    walks = [[each.as_rank for each in order.rehearsals] for order in stage.orders]
    assert walks == [[6, 0, 2], [7, 1, 3]]


def test_a_worker_that_comes_back_alone_rehearses_alone() -> None:
    stage = pairs()
    name = next(actor.incarnation for actor in stage.actors.values() if actor.rank < 0)
    stage.exit(name)
    stage.wait(12)
    *_, last = stage.orders
    assert [each.neighbours for each in last.rehearsals] == [()]


def test_a_class_without_recording_is_named_on_the_standby() -> None:
    stage = formed()
    stage.gate()
    stage.tell_classes()
    standby = next(actor for actor in stage.actors.values() if actor.rank < 0)
    body = msgspec.structs.replace(standby.ready(1), classes=("first", "middle"))
    stage.worker(standby.incarnation, body)
    (view,) = controller.status(stage.state, stage.now).standbys
    assert view.not_rehearsed == ("last: no recording when it began",)
