"""From what a group of ranks is restored after a loss: one decision for all of them.

The ladder: live replicas at the newest version; `main` entered anew where nothing is lost by it;
the newest snapshot that is complete in agents' memory; the newest durable checkpoint; in a job's
first moments its beginning; nothing. What is newer wins between memory and storage. Never a version
of a time line that was left, never a mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec

from trainmover.controller import agreement, disks, lookup, shelf, sources
from trainmover.controller.kept import START, Store
from trainmover.controller.move import Move
from trainmover.controller.state import Gathering, State, Worker
from trainmover.protocol import exits
from trainmover.protocol.messages import DiskPart, Plan, Report, Source, Version
from trainmover.topology import Member, Membership

Kind = Literal["live", "fresh", "rollback", "durable", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How the group goes on."""

    kind: Kind
    stayers: tuple[sources.Stayer, ...]
    """Who keeps its rank; everyone else's rank is lost."""
    target: Version = START
    restore: str = ""
    """Checkpoint to load, of a way that enters `main` anew."""
    parts: tuple[DiskPart, ...] = ()
    """What of it is taken from machines' own disks."""
    reason: str = ""
    """Why nothing can be restored."""

    @property
    def is_fresh(self) -> bool:
        """Whether every rank enters `main` anew."""
        return self.kind in {"fresh", "durable"}

    def lost(self, state: State) -> tuple[int, ...]:
        """Ranks that need a joiner."""
        staying = {each.rank for each in self.stayers}
        return tuple(m.rank for m in lookup.members(state) if m.rank not in staying)


def way_of(
    move: Move, reports: Mapping[str, Report], joining: Mapping[int, str] | None = None
) -> Way:
    """The best way that reports and kept states allow now.

    Args:
        move: Under way; only read.
        reports: Of the freeze, by incarnation.
        joining: Joiner by lost rank once they are known: what they have built shows identities.
    """
    everyone = agreement.reporters_of(move, reports)
    base = move.state.kept.base
    fresh = _fresh(move.state, everyone)
    live = _live(move, reports, joining)
    if live.kind == "fresh" and fresh.is_fresh:
        return fresh
    is_half = any(agreement.is_half_rolled_back(move, each.report) for each in everyone)
    if live.kind == "live" and not is_half:
        return live
    kept = _kept(move, everyone)
    if kept is not None:
        return kept
    if live.kind == "live":
        return fresh if fresh.is_fresh and live.target.step <= base.step else live
    if fresh.is_fresh and _has_just_begun(move.state):
        return fresh
    reasons = [live.reason, _nothing_kept(move.state) + _seen(move.state)]
    return Way(kind="none", stayers=everyone, reason="; ".join(filter(None, reasons)))


def _fresh(state: State, everyone: tuple[sources.Stayer, ...]) -> Way:
    """`main` entered anew where it was entered last, unless its checkpoint can't be read now."""
    kept = state.kept
    if disks.gone(state, kept.restore, kept.restore_disks):
        return Way(kind="none", stayers=everyone)
    return Way(
        kind="fresh",
        stayers=everyone,
        target=kept.base,
        restore=kept.restore,
        parts=kept.restore_disks,
    )


def _nothing_kept(state: State) -> str:
    durable = state.kept.durable
    text = "no snapshot of one version is held for every rank, and "
    if durable is None:
        return text + "there is no checkpoint"
    missing = ", ".join(disks.gone(state, durable.name, durable.disks))
    return text + f"parts of {durable.name} were on disks that can't be counted on ({missing})"


def _seen(state: State) -> str:
    look = state.kept.look
    return f" ({look.reason})" if look is not None and look.freeze and look.reason else ""


def _has_just_begun(state: State) -> bool:
    """Whether no snapshot has been seen complete yet: few steps are lost by beginning again.

    Where nothing is ever kept a job is stopped instead: it might be anywhere.
    """
    kept = state.kept
    is_kept = kept.keeping.snapshot.is_on and any(store.port for store in kept.stores.values())
    return is_kept and not kept.was_complete and not kept.is_relearning


def _live(move: Move, reports: Mapping[str, Report], joining: Mapping[int, str] | None) -> Way:
    """From those who have it in their hands, or from the beginning where that is as good."""
    state = move.state
    base = state.kept.base
    stayers = agreement.stayers_of(move, reports)
    fresh = Way(kind="fresh", stayers=stayers, target=base)
    if not stayers:
        if lookup.known_step(state) <= base.step:
            return fresh
        ranks = [member.rank for member in lookup.members(state)]
        text = f"no rank is left that could restore another; lost: {_list(ranks)}"
        return Way(kind="none", stayers=(), reason=text)
    target = sources.agree(stayers).target
    way = Way(kind="live", stayers=stayers, target=target)
    lost = way.lost(state)
    missing = agreement.restoration(move, stayers, lost, joining).missing
    if target.step <= base.step:
        # Nothing is lost by entering `main` anew: it gives the same numbers again.
        is_building = any(each.report.is_building for each in stayers)
        if is_building or not all(lookup.identity_of(state, rank) for rank in lost) or missing:
            return fresh
    if missing:
        return Way(kind="none", stayers=stayers, reason="; ".join(missing))
    return way


def _kept(move: Move, everyone: tuple[sources.Stayer, ...]) -> Way | None:
    """From agents' memory or from storage, whichever is newer."""
    state = move.state
    version, durable = _in_memory(state, everyone), state.kept.durable
    if durable is not None and disks.gone(state, durable.name, durable.disks):
        durable = None
    if version is not None and (durable is None or version.step >= durable.version.step):
        return Way(kind="rollback", stayers=everyone, target=version)
    if durable is not None:
        return Way(
            kind="durable",
            stayers=everyone,
            target=durable.version,
            restore=durable.name,
            parts=durable.disks,
        )
    return None


def _in_memory(state: State, everyone: tuple[sources.Stayer, ...]) -> Version | None:
    """What all ranks' snapshots are held of; whoever is building `main` has nothing to load it
    into."""
    is_building = any(each.report.is_building for each in everyone)
    return None if is_building and state.kept.restore_disks else shelf.best_version(state)


def _list(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(str(rank) for rank in ranks)}"


# --------------------------------------------------------------------------- sources


def snapshot_sources(
    state: State, members: tuple[Member, ...], version: Version
) -> tuple[Source, ...]:
    """For each rank the agent that serves its snapshot: its own machine's wherever that has it."""
    stores = shelf.reachable(state)
    load = dict.fromkeys(stores, 0)
    found = []
    for member in members:
        holders = [name for name in stores if stores[name].has(member.rank, version)]
        if not holders:
            continue
        rank, bad = member.rank, state.kept.distrusted
        trusted = [name for name in holders if (name, rank, version) not in bad] or holders
        if member.machine in trusted:
            name = member.machine
        else:
            name = min(trusted, key=lambda each: (load[each], lookup.natural_order(each)))
            load[name] += 1
        found.append(_source(member.rank, name, stores[name]))
    return tuple(found)


def _source(rank: int, machine: str, store: Store) -> Source:
    return Source(
        rank=rank,
        bulk_from="",
        own_from="",
        shared_from="",
        kind="snapshot",
        machine=machine,
        host=store.host,
        port=store.port,
    )


# --------------------------------------------------------------------------- hope


def has_hope(move: Move) -> bool:
    """Whether an agent that is not heard now may still say that it holds what is missing.

    Bounded: a silent machine is lost after its limit, and so is a new life of ours (C5).
    """
    state, config = move.state, move.state.config
    if not move.has_waited(state.started_at, config.lost_after_s) and state.kept.is_relearning:
        return True
    if not any(store.port for store in state.kept.stores.values()):
        return False
    incident = state.incident
    if incident is not None and not move.has_waited(incident.started_at, config.report_timeout_s):
        return True  # what was kept last may be on its way to us
    return disks.any_may_tell(move)


# --------------------------------------------------------------------------- the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Impossible:
    """Why no plan can be made."""

    code: int
    reason: str


def build(move: Move, phase: Gathering, way: Way) -> Plan | Impossible:
    """The plan that puts the seats' workers in place of the lost ranks."""
    state = move.state
    joining = {seat.rank: seat.incarnation for seat in phase.seats}
    lost = tuple(sorted(joining))
    members = tuple(
        _member_of(state.workers[joining[m.rank]], m.rank) if m.rank in joining else m
        for m in lookup.members(state)
    )
    plan = Plan(
        number=phase.number,
        kind="unplanned",
        base_generation=state.generation,
        target=way.target,
        membership=Membership(generation=phase.number, members=members),
        leavers=tuple(lookup.members(state)[rank].incarnation for rank in lost),
        joiners=tuple(joining[rank] for rank in lost),
        is_fresh_start=way.is_fresh,
        restore=way.restore,
        disks=disks.addressed(state, way.parts),
        reason=state.incident.reason if state.incident is not None else "",
    )
    match way.kind:
        case "fresh" | "durable":
            return plan
        case "rollback":
            return msgspec.structs.replace(
                plan,
                is_rollback=True,
                sources=snapshot_sources(state, members, way.target),
                attempts=_attempts(state, way, joining),
                renews_buckets=_may_buckets_differ(state, way, joining),
            )
        case "live":
            return _from_live(move, plan, way, joining)
        case "none":
            return Impossible(code=exits.CANNOT_RESTORE, reason=way.reason)
        case _ as never:
            assert_never(never)


def _from_live(move: Move, plan: Plan, way: Way, joining: Mapping[int, str]) -> Plan | Impossible:
    agreed = sources.agree(way.stayers)
    found = agreement.restoration(move, way.stayers, tuple(sorted(joining)), joining)
    if agreed.contradiction or found.missing:
        text = agreed.contradiction or "; ".join(found.missing)
        code = exits.PROTOCOL_FAILED if agreed.contradiction else exits.CANNOT_RESTORE
        return Impossible(code=code, reason=text)
    return msgspec.structs.replace(
        plan,
        sources=found.sources,
        result=agreed.result,
        attempts=_attempts(move.state, way, joining),
        renews_buckets=_may_buckets_differ(move.state, way, joining),
    )


def _attempts(state: State, way: Way, joining: Mapping[int, str]) -> int:
    """Decision 0003; without any stayer what the joiners have run, so that none starts over."""
    if way.stayers:
        return max(each.report.attempts for each in way.stayers)
    ready = [state.workers[name].readiness for name in joining.values()]
    return max((each.attempts for each in ready if each is not None), default=0)


def _may_buckets_differ(state: State, way: Way, joining: Mapping[int, str]) -> bool:
    """Decision 0013: somebody's DDP has not laid out its buckets anew, or is built once more."""
    if any(each.report.has_first_buckets for each in way.stayers):
        return True
    attempts = _attempts(state, way, joining)
    ready = [state.workers[name].readiness for name in joining.values()]
    return any(each is None or each.has_first_buckets or each.attempts > attempts for each in ready)


def _member_of(worker: Worker, rank: int) -> Member:
    return Member(
        rank=rank,
        incarnation=worker.incarnation,
        machine=worker.machine,
        host=worker.host,
        port=worker.port,
    )
