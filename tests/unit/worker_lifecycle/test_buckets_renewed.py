"""Buckets that start over by a plan which another one overtakes."""

from __future__ import annotations

from tests.unit.worker_lifecycle.stories import Worker, a_plan, edge, sent

from trainmover.protocol.messages import Abort, Freeze, PlanIssued, Report, Source, Version
from trainmover.worker.events import BoundaryReached, ChannelBroken

ME = "m0.0.a"
OTHERS = (ME, "m9.0.b", "m2.0.a", "m3.0.a")


def test_buckets_count_as_first_ones_from_the_plan_that_renews_them() -> None:
    """A second plan may overtake it when some have started over and others have not."""
    worker = Worker().form().do_step(0)
    worker.feed(ChannelBroken(generation=1, edge=edge("m1.0.a")))
    worker.feed(BoundaryReached(step=1, attempts=2))
    report = sent(worker.feed(Freeze(term=1, number=2)), Report)
    assert report is not None and not report.has_first_buckets
    source = Source(rank=1, bulk_from=ME, own_from=ME, shared_from=ME, kind="replica")
    target = Version(step=1, lineage=1)
    joiners = ("m9.0.b",)
    plan = a_plan(2, OTHERS, target=target, joiners=joiners, sources=(source,), renews_buckets=True)
    worker.feed(PlanIssued(term=1, plan=plan))
    worker.feed(Abort(term=1, number=2))
    report = sent(worker.feed(Freeze(term=1, number=3)), Report)
    assert report is not None and report.has_first_buckets
    worker.feed(BoundaryReached(step=1, attempts=2))
    assert not worker.state.has_first_buckets
