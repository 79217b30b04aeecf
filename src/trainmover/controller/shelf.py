"""Snapshots in agents' memory: who holds what, where copies go, what may be dropped.

Decides when a version is complete, places copies by fault domain after each change of machines,
asks for a snapshot where copies are missing, and lets older ones go only once a newer one is
complete with all its copies (C9). Decides nothing about restoring; a lost copy never stops
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from trainmover.controller import lookup, placing
from trainmover.controller.kept import NO_STORE, NO_VERSION, Kept, Store, TimeLine
from trainmover.controller.move import Move
from trainmover.controller.state import Machine, State, Switching, Training
from trainmover.protocol.messages import (
    AgentHello,
    KeepSnapshots,
    Plan,
    SnapshotFailed,
    SnapshotsHeld,
    TakeSnapshot,
    Version,
)
from trainmover.units import after, seconds

T = TypeVar("T")

PATIENCE_S = 5.0
"""After which an order whose effect is not seen is given again."""
MANY_VERSIONS = 8
"""In one agent's memory: with more than that nothing waits for the next pulse."""
MISSED_LIMIT = 256
SNAPSHOT = 1
CHECKPOINT = 2
EMERGENCY = 3

# --------------------------------------------------------------------------- what is there


def is_reachable(machine: Machine | None) -> bool:
    """Whether what an agent holds can be fetched now."""
    return machine is not None and machine.is_linked and not machine.is_lost


def reachable(state: State) -> dict[str, Store]:
    """Stores that can be read now, by machine."""
    found = {}
    for name in sorted(state.kept.stores):
        if is_reachable(state.machines.get(name)) and state.kept.stores[name].port:
            found[name] = state.kept.stores[name]
    return found


def complete_versions(state: State, *, is_trusting: bool = False) -> tuple[Version, ...]:
    """Versions of which every rank's snapshot is held by some agent, newest first.

    Args:
        state: What is known.
        is_trusting: Count snapshots too that could not be loaded once.
    """
    kept = state.kept
    ranks: dict[Version, set[int]] = {}
    for name, store in reachable(state).items():
        for held in store.held:
            if is_trusting or (name, held.rank, held.version) not in kept.distrusted:
                ranks.setdefault(held.version, set()).add(held.rank)
    whole = [version for version, have in ranks.items() if len(have) == state.spec.world_size]
    return tuple(sorted((v for v in whole if not kept.is_void(v)), reverse=True))


def is_suspect(state: State, version: Version) -> bool:
    """Whether some rank's loss was not finite when it was taken."""
    return any(
        held.is_suspect
        for store in state.kept.stores.values()
        for held in store.held
        if held.version == version
    )


def newest_sound(state: State) -> Version | None:
    """The newest complete version whose loss nobody doubts."""
    sound = (v for v in complete_versions(state) if not is_suspect(state, v))
    return next(sound, None)


def best_version(state: State) -> Version | None:
    """What a roll-back would go to: the newest complete one, a suspect one only if alone."""
    # Where nothing else is left, what failed once is tried again: the fault may have been a path's.
    found = complete_versions(state) or complete_versions(state, is_trusting=True)
    sound = [version for version in found if not is_suspect(state, version)]
    return next(iter((*sound, *found)), None)


def lacks_copies(state: State, version: Version, *, is_possible: bool = False) -> bool:
    """Whether a wanted copy of `version` (`is_possible`: that can still be made) isn't there."""
    stores = reachable(state)
    there = {
        name: {held.rank for held in store.held if held.version == version}
        for name, store in stores.items()
    }
    return any(
        owner.rank not in there.get(name, ())
        and not (is_possible and stores.get(owner.machine, NO_STORE).has_left(owner.rank, version))
        for owner in lookup.members(state)
        for name in state.kept.places.get(owner.machine, ())
    )


# --------------------------------------------------------------------------- what agents say


def on_hello(move: Move, hello: AgentHello) -> None:
    """Another life of an agent has nothing of what the one before held."""
    touch(move)
    keep(move, replace(move.state.kept, orders=_without(move.state.kept.orders, hello.machine)))
    store = move.state.kept.stores.get(hello.machine)
    if store is not None and store.agent != hello.incarnation:
        _forget(move, hello.machine)
    machine = move.state.machines.get(hello.machine)
    if machine is not None:
        move.keep_machine(replace(machine, labels=hello.labels, registered_at=move.now))


def on_held(move: Move, body: SnapshotsHeld) -> None:
    """The complete list of what one agent holds."""
    machine = move.state.machines.get(body.machine)
    if machine is None or machine.agent != body.incarnation:
        return
    kept = move.state.kept
    store = Store(
        agent=body.incarnation, host=body.host, port=body.port, held=body.held, level=body.level
    )
    newest = store.newest_own()
    due = kept.due
    if newest is not None and body.level >= CHECKPOINT and not kept.is_void(newest):
        waits = due is not None and (kept.durable is None or kept.durable.version < due)
        waits = waits and due not in (kept.suspect, kept.given_up)
        is_doubted = any(held.is_suspect for held in body.held if held.version == newest)
        # A suspect one never takes the place of a good one that is not durable yet.
        if due is None or (due < newest and not (waits and is_doubted)):
            due = newest
    is_done = newest is not None and newest.lineage >= kept.wanted_lineage > 0
    is_new = newest is not None and newest > kept.wanted_after
    if is_done and is_new and body.level >= kept.wanted_level:
        kept = replace(kept, wanted_level=0, wanted_at=None)
    stores = {**kept.stores, body.machine: store}
    is_settled = kept.is_settled and kept.stores.get(body.machine) == store
    keep(move, replace(kept, stores=stores, due=due, is_settled=is_settled))
    if len({each.version for each in body.held}) > MANY_VERSIONS:
        _drop(move)


def on_missed(move: Move, body: SnapshotFailed) -> None:
    """A rank has left a snapshot out: that version can never be complete."""
    kept = move.state.kept
    key = (body.rank, body.version)
    if key not in kept.missed:
        keep(move, replace(kept, missed=(*kept.missed, key)[-MISSED_LIMIT:], is_settled=False))


def distrust(move: Move, machine: str, rank: int, version: Version) -> None:
    """A snapshot could not be loaded from there: the next plan uses another copy."""
    kept = move.state.kept
    key = (machine, rank, version)
    if machine in kept.stores and key not in kept.distrusted:
        keep(move, replace(kept, distrusted=(*kept.distrusted, key)[-64:], is_settled=False))
        move.because(f"{machine} could not give step {version.step} of rank {rank}")


def on_machine_lost(move: Move, name: str) -> None:
    """Nobody answers there: its memory counts as gone, until its agent says what it holds."""
    _forget(move, name)


def _forget(move: Move, name: str) -> None:
    tell_apart(move)
    kept = move.state.kept
    stores, orders = _without(kept.stores, name), _without(kept.orders, name)
    keep(move, replace(kept, stores=stores, orders=orders, is_settled=False))


def touch(move: Move) -> None:
    """Something has changed that copies depend on: look again at the next pulse."""
    if move.state.kept.is_settled:
        keep(move, replace(move.state.kept, is_settled=False))


def _without(mapping: Mapping[str, T], name: str) -> Mapping[str, T]:
    return {key: value for key, value in mapping.items() if key != name}


def keep(move: Move, kept: Kept) -> None:
    """The knowledge after a change."""
    if kept is not move.state.kept:
        move.state = replace(move.state, kept=kept)


# --------------------------------------------------------------------------- commits


def on_commit(move: Move, plan: Plan) -> None:
    """Another membership: steps may be left behind, copies are missing, places are others."""
    kept = move.state.kept
    lines = kept.time_lines
    if leaves_steps(plan):
        lines = (*lines, TimeLine(target=plan.target, number=plan.number))
        # Steps are done again: new versions lie below what was kept on the time line before.
        kept = replace(kept, oldest=min(kept.oldest, plan.target))
    if plan.is_fresh_start:
        kept = replace(kept, base=plan.target, restore=plan.restore, restore_disks=plan.disks)
    due = kept.due
    kept = replace(kept, time_lines=lines, orders={}, ordered_at=None, is_settled=False)
    kept = replace(kept, wanted_after=NO_VERSION)
    keep(move, replace(kept, due=None if due is not None and kept.is_void(due) else due))
    if kept.keeping.snapshot.is_on:
        want(move, SNAPSHOT)


def leaves_steps(plan: Plan) -> bool:
    """Whether steps behind the target may have been done before that count no more."""
    return plan.is_rollback or (plan.is_fresh_start and plan.kind != "form")


def is_left(state: State, version: Version) -> bool:
    """Whether `version` lies on a time line that was left, or that a plan is about to leave."""
    if isinstance(state.phase, Switching) and leaves_steps(state.phase.plan):
        plan = state.phase.plan
        if TimeLine(target=plan.target, number=plan.number).voids(version):
            return True
    return state.kept.is_void(version)


def want(move: Move, level: int, *, is_another: bool = False) -> None:
    """Every rank is to take a snapshot; asked at the next pulse, and again until one is there.

    Args:
        move: The move under way.
        level: As in `SnapshotTaken.level`.
        is_another: What has been taken before does not fulfil it.
    """
    kept = move.state.kept
    if is_another:
        newest = [store.newest_own() or NO_VERSION for store in kept.stores.values()]
        kept = replace(kept, wanted_after=max([NO_VERSION, *newest]))
    wanted = replace(
        kept,
        wanted_level=max(level, kept.wanted_level),
        wanted_lineage=move.state.generation,
        wanted_at=None,
        is_settled=False,
    )
    keep(move, wanted)


# --------------------------------------------------------------------------- the pulse


def on_pulse(move: Move) -> None:
    """Once in a while: whatever is missing is ordered, whatever is superfluous dropped."""
    phase = move.state.phase
    if not isinstance(phase, Training) or not phase.has_passed_gate or move.state.kept.is_settled:
        return
    before = len(move.commands)
    if not move.state.kept.was_complete and complete_versions(move.state):
        keep(move, replace(move.state.kept, was_complete=True))
    tell_apart(move)
    if move.state.kept.keeping.snapshot.is_on:
        _place(move)
    ask(move)
    _drop(move)
    is_quiet = len(move.commands) == before and not move.state.kept.wanted_level
    if is_quiet and _are_all_there(move.state):
        keep(move, replace(move.state.kept, is_settled=True))


def tell_apart(move: Move) -> None:
    """Remember what is unlike, while those that show it are still heard."""
    found = move.state.kept.unlike_now()
    if len(found) > len(move.state.kept.unlike):
        keep(move, replace(move.state.kept, unlike=found))
        move.because("ranks of equal names hold other values: they are no replicas")


def ask(move: Move) -> None:
    """One member is enough: the gate tells all."""
    kept = move.state.kept
    if not kept.wanted_level or not _is_due(move, kept):
        return
    body = TakeSnapshot(term=move.state.term, level=kept.wanted_level)
    alive = [n for n in lookup.member_names(move.state) if n in move.state.workers]
    for name in alive[:1]:
        move.tell(name, body)
    keep(move, replace(kept, wanted_at=move.now))


def _is_due(move: Move, kept: Kept) -> bool:
    return kept.wanted_at is None or move.now >= after(kept.wanted_at, seconds(PATIENCE_S))


def _place(move: Move) -> None:
    state = move.state
    stores = reachable(state)
    kept = state.kept
    made = placing.choose(state, stores)
    orders = placing.orders(state, made.places, stores)
    is_late = kept.ordered_at is None or move.has_waited(kept.ordered_at, PATIENCE_S)
    for name in orders:
        is_new = kept.orders.get(name) != orders[name]
        if is_new or (is_late and not _are_copies_there(state, name, made.places[name])):
            move.send(name, orders[name])
    if made.reasons != kept.reasons:
        move.because("; ".join(made.reasons))
    placed = replace(
        move.state.kept,
        places=made.places,
        orders=orders,
        ordered_at=move.now if is_late else kept.ordered_at,
        reasons=made.reasons,
    )
    if made.places != kept.places or not kept.survival:
        chances, lethal = placing.survival(made.places), placing.fatal(state, made.places)
        placed = replace(placed, survival=chances, fatal=lethal)
    keep(move, placed)


def _are_all_there(state: State) -> bool:
    places = state.kept.places
    return all(_are_copies_there(state, owner, places[owner]) for owner in sorted(places))


def _are_copies_there(state: State, owner: str, places: tuple[str, ...]) -> bool:
    """Whether the newest snapshot of each rank of `owner` is at its places."""
    store = state.kept.stores.get(owner)
    newest = store.newest_own() if store is not None else None
    if store is None or newest is None:
        return True
    ranks = [rank for rank in lookup.ranks_on(state.membership, owner) if store.has(rank, newest)]
    copies = [state.kept.stores[name] for name in places if name in state.kept.stores]
    return len(copies) == len(places) and all(
        copy.has(rank, newest) for copy in copies for rank in ranks
    )


# --------------------------------------------------------------------------- needed no more


def _drop(move: Move) -> None:
    """C9: nothing goes before something newer is complete everywhere; of a left time line, all."""
    kept = move.state.kept
    newest = max(kept.oldest, _oldest_needed(move.state))
    oldest = min(newest, kept.reserved(complete_versions(move.state)) or newest)
    if oldest > kept.oldest:
        keep(move, replace(kept, oldest=oldest))
    hopeless = _hopeless_versions(move.state)
    for name, store in reachable(move.state).items():
        versions = {held.version for held in store.held}
        # Between what is being written and what is needed nothing is.
        void = {v for v in versions if kept.is_void(v) or oldest < v < newest or v in hopeless}
        if void or any(version < oldest for version in versions):
            body = KeepSnapshots(
                term=move.state.term, oldest=max(oldest, Version(step=0)), void=tuple(sorted(void))
            )
            move.send(name, body)


def _hopeless_versions(state: State) -> set[Version]:
    """Versions that can never be complete: a rank has left it out, or has a later one instead.

    Workers take nothing while older snapshots wait for their completion: with different versions in
    their slots they would wait for each other.
    """
    stores = reachable(state)
    ranks: dict[Version, set[int]] = {}
    newest: dict[int, Version] = {}
    for store in stores.values():
        for held in store.held:
            ranks.setdefault(held.version, set()).add(held.rank)
            if held.kind == "own" and not state.kept.is_void(held.version):
                newest[held.rank] = max(held.version, newest.get(held.rank, NO_VERSION))
    hopeless = {
        version
        for version, have in ranks.items()
        if any(latest > version for rank, latest in newest.items() if rank not in have)
    }
    return hopeless | {v for rank, v in state.kept.missed if rank not in ranks.get(v, {rank})}


def _oldest_needed(state: State) -> Version:
    """The newest version that makes all older ones superfluous."""
    sound = [v for v in complete_versions(state) if not is_suspect(state, v)]
    copied = [version for version in sound if not lacks_copies(state, version, is_possible=True)]
    # Copies that never get where they should be must not fill memory without end.
    return max([NO_VERSION, *copied[:1], *sound[1:2]])
