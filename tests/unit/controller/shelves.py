"""Agents that hold snapshots, for stories: what a job without replicas keeps, and who says so."""

from __future__ import annotations

from collections.abc import Iterable

from tests.unit.controller.play import Stage

from trainmover.protocol import journal
from trainmover.protocol import messages as m


def sharded(**options: object) -> Stage:
    """A job in which no rank's state is anybody else's (pure FSDP2), past its first gates."""
    stage = Stage(**options)  # type: ignore[arg-type]
    for name in stage.names:
        stage.hello(name)
    track(stage)
    stage.gate(2)
    stage.wait(2)
    return stage


def track(stage: Stage) -> None:
    """Members say whose state is whose: everybody's is its own."""
    for member in stage.members():
        actor = stage.actors[member.incarnation]
        actor.identity = f"shard {member.rank}"
        tracked = m.Tracked(
            incarnation=actor.incarnation,
            rank=member.rank,
            identity=actor.identity,
            names_digest=1,
        )
        stage.worker(actor.incarnation, tracked)


def held(
    rank: int, version: m.Version, kind: str = "own", *, is_suspect: bool = False
) -> m.SnapshotHeld:
    return m.SnapshotHeld(
        rank=rank,
        version=version,
        identity=f"shard {rank}",
        kind=kind,  # type: ignore[arg-type]
        size_bytes=8,
        is_suspect=is_suspect,
    )


def say(stage: Stage, machine: str, *snapshots: m.SnapshotHeld, level: int = 0) -> None:
    """The complete list of one agent."""
    body = m.SnapshotsHeld(
        machine=machine,
        incarnation=stage.agents.get(machine, f"agent-{machine}"),
        host=machine,
        port=7,
        held=snapshots,
        level=level,
    )
    stage.agent(machine, body)


def hold(
    stage: Stage,
    *versions: m.Version,
    without: Iterable[str] = (),
    level: int = 1,
    suspect: Iterable[m.Version] = (),
) -> None:
    """Each machine holds its ranks' snapshots, and then the copies that the controller placed."""
    names = [name for name in stage.names if name not in without]
    for name in names:
        say(stage, name, *_held_by(stage, name, versions, suspect)["own"], level=level)
    for name in names:
        found = _held_by(stage, name, versions, suspect)
        say(stage, name, *found["own"], *found["peer"], level=level)


def _held_by(
    stage: Stage, name: str, versions: tuple[m.Version, ...], suspect: Iterable[m.Version]
) -> dict[str, list[m.SnapshotHeld]]:
    found: dict[str, list[m.SnapshotHeld]] = {"own": [], "peer": []}
    for member in stage.members():
        if member.machine == name:
            kind = "own"
        elif name in stage.state.kept.places.get(member.machine, ()):
            kind = "peer"
        else:
            continue
        for version in versions:
            one = held(member.rank, version, kind, is_suspect=version in suspect)
            found[kind].append(one)
    return found


def settle(stage: Stage) -> None:
    """Every agent says where it listens; the controller places copies."""
    for name in stage.names:
        say(stage, name)
    stage.wait(2)


def at(step: int, lineage: int = 1) -> m.Version:
    return m.Version(step=step, lineage=lineage)


def plan(stage: Stage) -> m.Plan:
    return stage.recorded(journal.PlanRecorded)[-1].plan


def sent(stage: Stage, kind: type) -> list:
    """Orders to agents, and bodies for workers, of one kind, as (machine, body)."""
    found = []
    for machine, body in stage.sent:
        inner = body.body if isinstance(body, m.ToWorker) else body
        if isinstance(inner, kind):
            found.append((machine, inner))
    return found
