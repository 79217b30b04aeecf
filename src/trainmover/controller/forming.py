"""The first generation: enough compatible machines, one worker per rank, plan 1.

Decides which machines are active (given names first, else natural order: ranks never follow the
order of arrival, C91) and when the start has failed. Standbys come by the pool's own rules.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import disks, ending, looking, lookup, plans, pool
from trainmover.controller.move import Move
from trainmover.controller.state import Forming, Machine, Switching, Worker
from trainmover.protocol import exits
from trainmover.protocol.journal import MachinesChosen
from trainmover.protocol.messages import Plan
from trainmover.topology import Member, Membership


def advance(move: Move) -> None:
    """Choose machines, then issue plan 1 when every founder is up; fail at the deadline."""
    phase = move.state.phase
    if not isinstance(phase, Forming):
        return
    if _has_lost_founder(move, phase):
        phase = replace(phase, active=())
        move.enter(phase)
    if not phase.active:
        _choose(move, phase)
    phase = move.state.phase
    if isinstance(phase, Forming) and phase.active:
        pool.refill(move)
        if looking.has_start(move):
            _issue_when_up(move, phase)
    phase = move.state.phase
    if isinstance(phase, Forming) and move.now >= phase.deadline:
        text = f"not formed within {move.state.config.start_timeout_s:g} s: {_missing(move, phase)}"
        ending.stop(move, exits.START_FAILED, text)


def _has_lost_founder(move: Move, phase: Forming) -> bool:
    """Whether a chosen machine has gone; a link that is down for a moment is no reason."""
    chosen = [move.state.machines.get(name) for name in phase.active]
    return any(m is not None and (m.is_lost or m.is_leaving or m.is_retired) for m in chosen)


def _choose(move: Move, phase: Forming) -> None:
    config = move.state.config
    count = lookup.machine_count(move.state)
    usable = [machine.name for machine in lookup.usable_machines(move.state)]
    named = [name for name in config.machine_names[:count] if name in usable]
    if len(usable) < count:
        move.enter(replace(phase, complete_since=None))
        return
    since = phase.complete_since if phase.complete_since is not None else move.now
    is_whole = len(named) == count or (
        not config.machine_names and len(usable) >= count + config.standby_machines
    )
    if not is_whole and not move.has_waited(since, config.gather_s):
        move.enter(replace(phase, complete_since=since))
        return
    rest = [name for name in usable if name not in named]
    order = {name: place for place, name in enumerate(config.machine_names)}
    active = tuple(sorted((named + rest)[:count], key=lambda name: order.get(name, len(order))))
    workers, parts = move.state.spec.workers_per_machine, move.state.kept.restore_disks
    active = disks.arranged(active, workers, parts)
    first = move.state.machines[active[0]]
    for name in active[1:]:
        unequal = lookup.difference(first.facts, move.state.machines[name].facts)
        if unequal:
            text = f"{name} differs from {active[0]}: {unequal}"
            ending.stop(move, exits.INCOMPATIBLE, text)
            return
    _begin(move, phase, active, first)


def _begin(move: Move, phase: Forming, active: tuple[str, ...], first: Machine) -> None:
    move.append(MachinesChosen(machines=active, facts=first.facts))
    move.state = replace(move.state, facts=first.facts)
    move.enter(replace(phase, active=active))
    move.because(f"machines {', '.join(active)} play the ranks")
    for machine in lookup.usable_machines(move.state):
        unequal = lookup.difference(first.facts, machine.facts)
        if unequal:
            pool.refuse(move, machine.name, f"{machine.name} differs from {first.name}: {unequal}")


def _founders(move: Move, phase: Forming) -> dict[int, Worker]:
    """Live workers of active machines by rank."""
    found: dict[int, Worker] = {}
    for index, name in enumerate(phase.active):
        for worker in lookup.workers_on(move.state, name):
            rank = index * move.state.spec.workers_per_machine + worker.local_rank
            if worker.role in {"starting", "standby"} and worker.is_up:
                found[rank] = worker
    return found


def _issue_when_up(move: Move, phase: Forming) -> None:
    founders = _founders(move, phase)
    world_size = move.state.spec.world_size
    if len(founders) < world_size:
        return
    for rank in range(1, world_size):
        unequal = lookup.difference(founders[0].facts, founders[rank].facts)
        if unequal:
            machine = founders[rank].machine
            text = f"{machine} (rank {rank}) differs from {founders[0].machine}: {unequal}"
            ending.stop(move, exits.INCOMPATIBLE, text)
            return
    number = move.next_number()
    members = tuple(
        Member(
            rank=rank,
            incarnation=founders[rank].incarnation,
            machine=founders[rank].machine,
            host=founders[rank].host,
            port=founders[rank].port,
        )
        for rank in range(world_size)
    )
    plan = Plan(
        number=number,
        kind="form",
        base_generation=0,
        target=move.state.kept.base,
        membership=Membership(generation=number, members=members),
        joiners=tuple(member.incarnation for member in members),
        is_fresh_start=True,
        restore=move.state.kept.restore,
        disks=disks.addressed(move.state, move.state.kept.restore_disks),
        reason="formation",
    )
    plans.issue(move, plan)


def _missing(move: Move, phase: Forming) -> str:
    count = lookup.machine_count(move.state)
    usable = [machine.name for machine in lookup.usable_machines(move.state)]
    if not phase.active:
        return f"{len(usable)} of {count} machines have registered ({', '.join(usable) or 'none'})"
    founders = _founders(move, phase)
    silent = [rank for rank in range(move.state.spec.world_size) if rank not in founders]
    return f"workers of ranks {', '.join(str(rank) for rank in silent)} did not come up"


def on_gone(move: Move, worker: Worker, evidence: str) -> None:
    """A worker ended before the first generation."""
    phase = move.state.phase
    if not isinstance(phase, Forming) or worker.machine not in phase.active:
        return
    tries = phase.tries + 1
    move.enter(replace(phase, tries=tries))
    if tries >= move.state.config.max_tries:
        text = f"workers ended {tries} times before training began, the last: {evidence}"
        ending.stop(move, exits.START_FAILED, text)


def start_over(move: Move, phase: Switching, evidence: str) -> None:
    """Plan 1 can't be carried out: abort it and form again with whoever is left."""
    plans.abort(move, phase.plan, evidence)
    active = phase.plan.membership.machines()
    tries = move.count_try("form", 0, 0)
    if tries >= move.state.config.max_tries:
        text = f"the first generation could not be formed in {tries} tries: {evidence}"
        ending.stop(move, exits.START_FAILED, text)
        return
    deadline = move.in_(move.state.config.start_timeout_s)
    move.enter(Forming(deadline=deadline, active=active))
    advance(move)
