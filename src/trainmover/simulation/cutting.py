"""A simulated cut-over: channels inherited and opened, marks, transfer of state, re-seeding (W14).

Does with three integers what worker/runtime.py does with tensors. A source serves only at exactly
the version the plan names (finding 8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainmover.checks import observations as seen
from trainmover.protocol.messages import ChannelCount, Edge, Plan, Version
from trainmover.simulation import attempt, fetching, increments, loading, tails
from trainmover.simulation.channels import Ask, Channel, CutMark, CutOverWork, Part, Personal
from trainmover.simulation.numbers import Numbers
from trainmover.topology.membership import backups_of, wards_of
from trainmover.worker import events as worker_events
from trainmover.worker.lifecycle_state import CuttingOver, Prepared

if TYPE_CHECKING:
    from trainmover.simulation.process import Process

STUCK_S = 20.0
"""After which a cut-over names the peer it waits for."""
PARTS = ("bulk", "own", "shared")


def prepare_phase_one(process: Process, plan: Plan) -> None:
    """Open what the plan adds, in the background."""
    added = [name for name in _peers(process, plan) if name not in process.channels]
    for peer in added:
        _open(process, plan.number, peer)

    def look(tries: int) -> None:
        missing = [name for name in added if name not in process.next_channels]
        switch = process.life.switch
        if switch is None or switch.plan.number != plan.number:
            return
        # Stayers must have their first steps behind them: the joiner has.
        is_settled = not process.life.is_member or process.iterations >= attempt.LAID_OUT
        if not missing and is_settled:
            process.feed(worker_events.PhaseOneDone(number=plan.number))
        elif tries > 200:
            edge = Edge(peer=(missing or plan.joiners)[0], reason="no answer")
            process.feed(worker_events.PhaseOneBroke(number=plan.number, edge=edge))
        else:
            process.later(0.1, lambda: look(tries + 1))

    process.later(0.05, lambda: look(0))


def _peers(process: Process, plan: Plan) -> tuple[str, ...]:
    """Whom this process needs a channel to: all members; joiner and leaver each other too."""
    members = [member.incarnation for member in plan.membership.members]
    leavers = list(plan.leavers) if plan.kind == "planned" else []
    if process.name in leavers:
        return tuple(name for name in plan.joiners)
    if process.name in plan.joiners:
        members += leavers
    return tuple(name for name in members if name != process.name)


def _open(process: Process, number: int, peer: str) -> None:
    """Half of a rendezvous: the connection exists once both ends have asked for it."""
    world = process.world
    key = (number, min(process.name, peer), max(process.name, peer))
    waiting = world.rendezvous.setdefault(key, {})
    waiting[process.name] = process
    other = waiting.get(peer)
    if other is None or not other.is_alive:
        return
    del world.rendezvous[key]
    world.connect(process, other, number)


def opened(process: Process, peer: str, channel: Channel) -> None:
    """A new connection stands."""
    process.next_channels[peer] = channel
    work = process.cut_over
    if work is not None and peer in work.peers:
        work.opened += 1
    advance(process)


def start(process: Process, plan: Plan) -> None:
    """CUT OVER to `plan`."""
    is_leaver = plan.membership.rank_of(process.name) is None
    is_joiner = process.name in plan.joiners and not plan.is_fresh_start
    work = CutOverWork(plan, is_joiner, is_leaver, _peers(process, plan))
    work.proceed = lambda: advance(process)
    process.cut_over = work
    process.restore = plan if plan.restore else None
    tails.go_back(process, plan)
    if plan.renews_buckets:
        process.iterations = 0
    process.world.moment("cut_over")
    mark = CutMark(plan.number)
    for peer in work.peers:
        old = process.channels.get(peer)
        if peer in process.next_channels:
            if process.next_channels[peer].is_broken:
                del process.next_channels[peer]
                _open(process, plan.number, peer)
        elif old is not None and not old.is_broken:
            process.next_channels[peer] = old
            work.inherited += 1
        else:
            _open(process, plan.number, peer)
    for peer in work.peers:
        channel = process.channels.get(peer)
        if channel is not None and process.next_channels.get(peer) is channel:
            channel.send(process, mark)
    take_early_personal(process)
    advance(process)
    process.later(STUCK_S, lambda: _name_stuck(process, work))


def _name_stuck(process: Process, work: CutOverWork) -> None:
    if process.cut_over is not work or work.is_done:
        return
    missing = _missing(process, work)
    peer = missing[0] if missing else work.peers[0]
    is_at_agent = work.plan.is_rollback or (work.base is None and process.fetch is not None)
    if is_at_agent and process.fetch is not None and not missing:
        peer = process.fetch.machine
    edge = Edge(peer=peer, reason="cut-over stuck")
    process.feed(worker_events.CutOverBroke(number=work.plan.number, edge=edge))


def _missing(process: Process, work: CutOverWork) -> list[str]:
    marked = process.marks.get(work.plan.number, set())
    missing = []
    for peer in work.peers:
        channel = process.next_channels.get(peer)
        is_inherited = channel is not None and process.channels.get(peer) is channel
        if channel is None or channel.is_broken or (is_inherited and peer not in marked):
            missing.append(peer)
    return missing


def advance(process: Process) -> None:
    """Do whatever has become possible; report when nothing is left."""
    work = process.cut_over
    if work is None:
        return
    _serve(process, work)
    if work.is_done or _missing(process, work):
        return
    if work.plan.is_rollback and not work.is_loaded:
        loading.ask(process, work)
        return
    if work.is_joiner and not work.is_loaded:
        _ask(process, work)
        if len(work.parts) < len(PARTS):
            return
        _load(process, work)
    if not work.is_leaver and not work.is_reseeded and not work.plan.is_fresh_start:
        work.is_reseeded = True
        _reseed(process, work)
    if not _is_finished(process, work):
        return
    work.is_done = True
    _report(process, work)


def _is_finished(process: Process, work: CutOverWork) -> bool:
    plan = work.plan
    if plan.is_fresh_start:
        return True
    if work.is_leaver:
        mine = [source for source in plan.sources if source.bulk_from == process.name]
        return len(work.served) >= len(mine) * len(PARTS)
    rank = plan.membership.rank_of(process.name)
    wards = wards_of(rank, plan.membership) if rank is not None else ()
    return all((ward, plan.target) in process.personal for ward in wards)


def _report(process: Process, work: CutOverWork) -> None:
    plan = work.plan
    is_loaded = work.is_joiner or plan.is_rollback
    applied = plan.target if is_loaded else process.life.applied
    event = seen.PreparedAt(incarnation=process.name, number=plan.number, applied=applied)
    process.world.observe(event)
    is_fresh = plan.is_fresh_start
    done = worker_events.CutOverDone(
        number=plan.number,
        version=plan.target,
        identity="" if is_fresh else process.identity(),
        bulk_digest=0 if is_fresh else process.numbers.bulk,
        shared_digest=0 if is_fresh else process.numbers.shared,
        channels=ChannelCount(inherited=work.inherited, opened=work.opened),
        adopted="as_built" if work.is_joiner else "",
    )
    process.later(0.0005, lambda: process.feed(done))


# ------------------------------------------------------------------ state


def _ask(process: Process, work: CutOverWork) -> None:
    rank = work.plan.membership.rank_of(process.name)
    for source in () if work.asked else work.plan.sources:
        if source.rank != rank:
            continue
        server = source.machine or process.world.processes[source.bulk_from].machine
        if fetching.begin(process, work, server) is None:
            return
        work.asked = True
        origins = (source.bulk_from, source.own_from, source.shared_from)
        is_played = source.kind == "increments"
        if is_played:
            increments.begin(process, work, source)
        for part, origin in list(zip(PARTS, origins, strict=True))[int(is_played) :]:
            channel = process.next_channels.get(origin)
            if channel is not None:
                channel.send(process, Ask(work.plan.number, part, source.rank))


def on_transfer(process: Process, peer: str, frame: Ask | Part) -> None:
    """A request for state, or a part of it."""
    if isinstance(frame, Ask):
        process.asks.append((peer, frame))
    else:
        work = process.cut_over
        if work is None or work.plan.number != frame.generation or not work.is_joiner:
            return
        if frame.part == "updates":
            increments.play(process, work, frame)
        else:
            work.parts[frame.part] = frame
    advance(process)


def _is_at_target(process: Process, number: int, target: Version) -> bool:
    switch = process.life.switch
    is_in = isinstance(switch, CuttingOver | Prepared) and switch.plan.number == number
    return is_in and process.life.applied == target


def _serve(process: Process, work: CutOverWork) -> None:
    number, target = work.plan.number, work.plan.target
    if not process.asks or not _is_at_target(process, number, target):
        return
    waiting, process.asks = process.asks, []
    for peer, ask in waiting:
        if ask.generation == number:
            process.later(process.world.scenario.move_s, _sender(process, work, peer, ask))


def _sender(process: Process, work: CutOverWork, peer: str, ask: Ask) -> Callable[[], None]:
    def send() -> None:
        channel = process.next_channels.get(peer)
        part = _part_of(process, work, ask)
        if channel is None or process.cut_over is not work:
            return
        if part is None:
            text = f"{process.name} is asked for {ask.part} of rank {ask.rank} and has none"
            process.world.fail("I8", text)
            return
        channel.send(process, part)
        work.served.add(f"{peer} {ask.part}")
        advance(process)

    return send


def _part_of(process: Process, work: CutOverWork, ask: Ask) -> Part | None:
    if ask.part == "updates":
        return increments.serve(process, work, ask)
    value = _value_of(process, work, ask)
    return None if value is None else Part(ask.generation, ask.part, work.plan.target, value)


def _value_of(process: Process, work: CutOverWork, ask: Ask) -> int | None:
    if ask.part == "bulk":
        return process.numbers.bulk
    if ask.part == "shared":
        return process.numbers.shared
    if process.life.rank == ask.rank:
        return process.numbers.own
    value, is_final = process.personal.get((ask.rank, work.plan.target), (0, False))
    return value if is_final else None


def _load(process: Process, work: CutOverWork) -> None:
    parts = work.parts
    process.numbers = Numbers(parts["bulk"].value, parts["own"].value, parts["shared"].value)
    work.is_loaded = True
    fetching.end(process, process.fetch)
    event = seen.JoinerLoaded(
        incarnation=process.name,
        number=work.plan.number,
        bulk=parts["bulk"].version,
        own=parts["own"].version,
        shared=parts["shared"].version,
    )
    process.world.observe(event)


def _reseed(process: Process, work: CutOverWork) -> None:
    """Personal state of the target to both backups of the next generation (finding 7)."""
    plan = work.plan
    rank = plan.membership.rank_of(process.name)
    if rank is None:
        return
    for backup in backups_of(rank, plan.membership):
        channel = process.next_channels.get(plan.membership.members[backup].incarnation)
        if channel is None:
            continue
        updates = increments.renewed(process, plan, rank, backup)
        own = process.numbers.own
        channel.send(process, Personal(plan.number, rank, plan.target, own, True, updates))


def take_early_personal(process: Process) -> None:
    """Re-seeded state that arrived before this process had begun (or as it arrives)."""
    work = process.cut_over
    if work is None:
        return
    kept = []
    for peer, frame in process.early:
        if isinstance(frame, Personal) and frame.generation == work.plan.number:
            attempt.store_personal(process, frame)
        else:
            kept.append((peer, frame))
    process.early = kept
    advance(process)


# ------------------------------------------------------------------ the end of it


def commit(process: Process, number: int, target_step: int) -> None:
    """Run in `number`: what only the old generation used is closed."""
    work = process.cut_over
    process.cut_over = None
    if work is None or work.is_leaver:
        return
    old = process.channels
    members = {member.incarnation for member in work.plan.membership.members}
    kept = {peer: item for peer, item in process.next_channels.items() if peer in members}
    for peer, channel in sorted({**old, **process.next_channels}.items()):
        if kept.get(peer) is not channel and not _is_leaver_of(work, peer):
            channel.fail("not used any more", by=process)
    process.channels, process.next_channels = kept, {}
    process.generation = number
    process.is_broken = False
    process.gate = None
    process.data, process.gate_frames, process.tail_data = {}, {}, {}
    process.kept = None
    if work.plan.is_fresh_start:
        process.personal = {}
    process.last_gate = min(process.last_gate, target_step - 1)
    for key in [key for key in process.personal if key[1].step > target_step]:
        del process.personal[key]
    increments.committed(process, work.plan)
    process.world.observe(seen.RunsIn(incarnation=process.name, generation=number))
    process.later(0.0001, lambda: _after_commit(process, number))


def _is_leaver_of(work: CutOverWork, peer: str) -> bool:
    return peer in work.plan.leavers


def _after_commit(process: Process, number: int) -> None:
    if process.generation != number:
        return
    process.flush_early()
    for peer, channel in sorted(process.channels.items()):
        if channel.is_broken:
            edge = Edge(peer=peer, reason="broken at the commit")
            process.feed(worker_events.ChannelBroken(generation=number, edge=edge))


def abort(process: Process, number: int) -> None:
    """Forget `number`: close what only it used."""
    process.cut_over = None
    fetching.call_off(process, number)
    dropped, process.next_channels = process.next_channels, {}
    for peer, channel in sorted(dropped.items()):
        if process.channels.get(peer) is not channel:
            channel.fail(f"{number} is aborted", by=process)
