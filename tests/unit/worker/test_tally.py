"""What a stayer exchanged between its stop and the commit is counted, repeated messages apart."""

from __future__ import annotations

from typing import Any

from trainmover.communicator.counters import Counters
from trainmover.protocol.messages import (
    AtBoundary,
    Broken,
    Commit,
    Done,
    Edge,
    FirstGate,
    Freeze,
    Message,
    Plan,
    PlanIssued,
    Report,
    StepLogged,
    Traffic,
    Version,
)
from trainmover.topology import Membership
from trainmover.worker.tally import Tally

AT = Version(step=7)
ME = "m0.0.1-1"


def plan(number: int) -> PlanIssued:
    membership = Membership(generation=number, members=())
    kind: Any = "unplanned"
    body = Plan(number=number, kind=kind, base_generation=1, target=AT, membership=membership)
    return PlanIssued(term=1, plan=body)


def traffic(tally: Tally, generation: int) -> Traffic | None:
    said = tally.sent(FirstGate(incarnation=ME, generation=generation, step=8))
    assert isinstance(said, FirstGate)
    return said.traffic


def play(tally: Tally, *messages: Message) -> None:
    for message in messages:
        if isinstance(message, Freeze | PlanIssued | Commit):
            tally.received(message)
        else:
            assert tally.sent(message) is message


def test_a_loss_is_counted_from_the_first_word_to_the_commit() -> None:
    tally = Tally()
    readings = iter([Counters(3, 0, 100, 1000, 0), Counters(4, 1, 107, 1350, 0)])
    tally.read_counters = lambda: next(readings)
    broken = Broken(incarnation=ME, generation=1, step=7, edges=(Edge(peer="m1", reason="gone"),))
    report = Report(incarnation=ME, number=2, generation=1, rank=0)
    done = Done(incarnation=ME, number=2, version=AT)
    logged = StepLogged(incarnation=ME, step=6, lineage=1, values=())
    play(tally, logged, broken, logged, Freeze(term=1, number=2), report, report)
    play(tally, plan(2), plan(2), done, Commit(term=1, number=2))
    assert traffic(tally, 2) == Traffic(
        messages_sent=2,
        messages_received=3,
        messages_repeated=2,
        frames_sent=7,
        bytes_sent=350,
    )
    assert traffic(tally, 3) is None


def test_a_planned_move_is_counted_from_the_boundary() -> None:
    tally = Tally()
    for number in (2, 3):
        at = AtBoundary(incarnation=ME, number=number, version=AT)
        done = Done(incarnation=ME, number=number, version=AT)
        play(tally, at, plan(number), done, Commit(term=1, number=number))
        found = traffic(tally, number)
        assert found == Traffic(messages_sent=2, messages_received=2)


def test_a_plan_that_comes_before_the_own_stop_counts_as_one_that_comes_after_it() -> None:
    tally = Tally()
    at = AtBoundary(incarnation=ME, number=3, version=AT)
    done = Done(incarnation=ME, number=3, version=AT)
    aborted, repeated = plan(2), plan(3)
    play(tally, aborted, plan(3), at, repeated, done, Commit(term=1, number=3))
    assert traffic(tally, 3) == Traffic(messages_sent=2, messages_received=2, messages_repeated=1)


def test_who_is_frozen_first_counts_what_one_does_that_breaks_first() -> None:
    counts = []
    broken = Broken(incarnation=ME, generation=1, step=7, edges=(Edge(peer="m1", reason="gone"),))
    for first_words in ((broken,), ()):
        tally = Tally()
        report = Report(incarnation=ME, number=2, generation=1, rank=0)
        done = Done(incarnation=ME, number=2, version=AT)
        play(tally, *first_words, Freeze(term=1, number=2), report, plan(2), done)
        play(tally, Commit(term=1, number=2))
        counts.append(traffic(tally, 2))
    assert counts == [Traffic(messages_sent=2, messages_received=3)] * 2


def test_a_commit_that_a_peer_tells_first_counts_like_the_controllers() -> None:
    tally = Tally()
    late = None
    for number in (2, 3):
        play(tally, AtBoundary(incarnation=ME, number=number, version=AT))
        if late is not None:
            play(tally, late)  # of the switchover before: it neither counts nor ends this one
        play(tally, plan(number), Done(incarnation=ME, number=number, version=AT))
        assert traffic(tally, number) == Traffic(messages_sent=2, messages_received=2)
        late = Commit(term=1, number=number)


def test_an_order_to_somebody_who_goes_on_opens_nothing() -> None:
    tally = Tally()
    play(tally, plan(2), Commit(term=1, number=2))
    assert traffic(tally, 2) is None
