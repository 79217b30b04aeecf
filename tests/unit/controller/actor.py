"""An actor for one worker process: what it is and the honest answers it can give."""

from __future__ import annotations

from dataclasses import dataclass

from trainmover.protocol import messages as m

START = m.Version(step=0)


@dataclass
class Actor:
    """A worker process."""

    incarnation: str
    machine: str
    local_rank: int
    rank: int = -1
    generation: int = 0
    version: m.Version = START
    has_entered: bool = False
    prepared: int = 0
    prepared_version: m.Version = START
    promise: int = 0
    is_building: bool = False
    identity: str = "all"
    holds_for: tuple[int, ...] | None = None
    replay_from: m.Version | None = None
    """Oldest version that it holds everybody's updates from."""
    broken_state: str = ""
    is_half_rolled_back: bool = False
    edges: tuple[m.Edge, ...] = ()
    is_stopped: bool = False
    bulk_digest: int = 7
    has_first_buckets: bool = False

    def done(self, plan: m.Plan) -> m.Done:
        """Prepared exactly as the plan says."""
        return m.Done(
            incarnation=self.incarnation,
            number=plan.number,
            version=plan.target,
            identity="" if plan.is_fresh_start else self.identity,
            bulk_digest=0 if plan.is_fresh_start else self.bulk_digest,
            shared_digest=0 if plan.is_fresh_start else 5,
        )

    def up(self) -> m.WorkerUp:
        """What it says of itself."""
        return m.WorkerUp(incarnation=self.incarnation, host="h", port=1, pid=1)

    def ready(self, as_rank: int) -> m.StandbyReady:
        """What it says of itself."""
        return m.StandbyReady(
            incarnation=self.incarnation,
            as_rank=as_rank,
            identity=self.identity,
            attempts=2,
            sequence_digest="s",
            can_adopt_in_place=True,
            has_first_buckets=self.has_first_buckets,
        )

    def broken(self) -> m.Broken:
        """What it says of itself."""
        return m.Broken(
            incarnation=self.incarnation,
            generation=self.generation,
            step=self.version.step,
            edges=self.edges,
        )

    def report(self, number: int, world: int) -> m.Report:
        """What an honest worker reports; it holds everybody's personal state of both steps."""
        held: tuple[m.Held, ...] = ()
        if self.rank >= 0:
            owners = range(world) if self.holds_for is None else self.holds_for
            ahead = m.Version(step=self.version.step + 1, lineage=self.generation)
            held = tuple(
                m.Held(
                    owner_rank=owner,
                    version=version,
                    is_final=True,
                    replay_from=self.replay_from,
                )
                for owner in owners
                for version in (self.version, ahead)
                if owner != self.rank
            )
        return m.Report(
            incarnation=self.incarnation,
            number=number,
            generation=self.generation,
            rank=self.rank,
            prepared_number=self.prepared,
            applied=self.version,
            has_entered=self.has_entered,
            last_result=(0, 0, 1, 0, 0, 0, 0, 0),
            broken_state=self.broken_state,
            is_half_rolled_back=self.is_half_rolled_back,
            is_building=self.is_building,
            identity=self.identity if self.rank >= 0 else "",
            attempts=3,
            sequence_digest="s" if self.rank >= 0 else "",
            personal=held,
            edges=self.edges,
            has_first_buckets=self.has_first_buckets,
        )
