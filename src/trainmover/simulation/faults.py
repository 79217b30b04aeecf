"""Faults strike: what dies, stops, breaks or is asked for, and when within a switchover.

Victims are drawn when the fault strikes, among what is there. Heals everything at the end, so that
liveness can be demanded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainmover import agent, controller
from trainmover.protocol.messages import StopRequest, SwitchoverRequest
from trainmover.simulation.scenario import Fault

if TYPE_CHECKING:
    from trainmover.simulation.machine import Machine
    from trainmover.simulation.process import Process
    from trainmover.simulation.world import World


class Strike:
    """One fault of the scenario, waiting for its moment."""

    def __init__(self, world: World, fault: Fault) -> None:
        self.world = world
        self.fault = fault

    def __call__(self) -> None:
        """Its time has come: strike, or wait for the moment it aims at."""
        if self.fault.aim:
            self.world.armed.append(self)
        else:
            self.strike()

    def strike(self) -> None:
        """Strike now."""
        if self.world.commander.end is not None:
            return
        self.world.note(f"FAULT {self.fault.kind} for {self.fault.lasts_s:.1f} s")
        STRIKES[self.fault.kind](self.world, self.fault)


def moment(world: World, name: str) -> None:
    """`name` has come somewhere: of the faults that wait for it, some strike within it."""
    for strike in [item for item in world.armed if item.fault.aim == name]:
        if world.random.random() < 0.4:
            world.armed.remove(strike)
            delay = world.random.uniform(0.0, 3.0) * world.scenario.channel_delay_s
            if world.random.random() < 0.3:
                delay += world.random.uniform(0.0, 4.0) * world.scenario.link_delay_s
            world.schedule.after(delay, strike.strike)


def _members(world: World) -> list[Process]:
    return [
        process
        for name, process in sorted(world.processes.items())
        if process.is_alive and process.machine in world.machines
    ]


def _machines(world: World) -> list[Machine]:
    return [
        machine for machine in world.machine_list() if machine.is_alive and not machine.has_left
    ]


def _kill_worker(world: World, fault: Fault) -> None:
    del fault
    victims = _members(world)
    if victims:
        victim = world.random.choice(victims)
        world.losses.append(victim.name)
        world.note(f"kill {victim.name}")
        victim.end(None, 9)


def _kill_machine(world: World, fault: Fault, *, is_silent: bool = False) -> None:
    del fault
    victims = _machines(world)
    if victims:
        _end_machine(world, world.random.choice(victims), is_silent=is_silent)


def _kill_all_machines(world: World, fault: Fault) -> None:
    """What storage has is all that is left."""
    del fault
    for victim in _machines(world):
        _end_machine(world, victim, is_silent=False)


def _reboot_all_machines(world: World, fault: Fault) -> None:
    """A power cut: memory is gone everywhere, and every machine comes back with its disk."""
    del fault
    for victim in _machines(world):
        world.losses.append(victim.name)
        world.note(f"power cut at {victim.name}")
        victim.die(is_silent=False)
        world.schedule.after(
            world.scenario.revive_s or 2.0, partial(victim.revive, keeps_disk=True)
        )


def _end_machine(world: World, victim: Machine, *, is_silent: bool) -> None:
    world.losses.append(victim.name)
    world.note(f"kill machine {victim.name}")
    victim.die(is_silent=is_silent)
    if world.scenario.revive_s:
        world.schedule.after(world.scenario.revive_s, victim.revive)


def _lose_machines(world: World, fault: Fault) -> None:
    """Several at once: some come back with their disks, some with empty ones, some never."""
    victims = _machines(world)
    is_all = world.random.random() < 0.5
    count = len(victims) if is_all else world.random.randint(min(2, len(victims)), len(victims))
    for victim in world.random.sample(victims, count):
        world.losses.append(victim.name)
        keeps_disk = world.random.random() < 0.85
        back_s = world.random.uniform(0.2, 2.0) * fault.lasts_s
        world.note(f"lose {victim.name}, disk {keeps_disk}, for {back_s:.1f} s")
        victim.die(is_silent=False)
        if keeps_disk or is_all or world.scenario.revive_s:
            world.schedule.after(back_s, partial(victim.revive, keeps_disk=keeps_disk))


def _silence_source(world: World, fault: Fault) -> None:
    """Somebody fetches state from a machine: that one goes dark."""
    names = sorted({p.fetch.machine for p in _members(world) if p.fetch is not None})
    names = [name for name in names if world.machines[name].is_alive]
    if names:
        _end_machine(world, world.machines[world.random.choice(names)], is_silent=True)
    else:
        _kill_worker(world, fault)


def _silence_machine(world: World, fault: Fault) -> None:
    _kill_machine(world, fault, is_silent=True)


def _stop_worker(world: World, fault: Fault) -> None:
    victims = _members(world)
    if victims:
        victim = world.random.choice(victims)
        if fault.lasts_s > 2.0:
            world.losses.append(victim.name)
        world.note(f"stop {victim.name}")
        victim.stop_for(fault.lasts_s)


def _freeze_machine(world: World, fault: Fault) -> None:
    """A paused host: workers stop, the agent is not heard; then all goes on as if nothing was."""
    victims = _machines(world)
    if not victims:
        return
    victim = world.random.choice(victims)
    world.losses.append(victim.name)
    world.note(f"freeze machine {victim.name}")
    _cut(world, "controller", victim.name, fault.lasts_s)
    world.unlink_after(victim, min(6.0, fault.lasts_s))
    for process in _members(world):
        if process.machine == victim.name:
            process.stop_for(fault.lasts_s)


def _grace(world: World) -> float:
    """Seconds that a notice leaves; 0: it does not say. By the instant: draws nothing, so that a
    seed's other faults stay what they were."""
    return (0.0, 0.0, 3.0, 20.0)[world.schedule.now // 1_000_000 % 4]


def _leave_machine(world: World, fault: Fault) -> None:
    del fault
    victims = [machine for machine in _machines(world) if machine.is_agent_alive]
    if victims:
        victim = world.random.choice(victims)
        world.losses.append(victim.name)
        world.note(f"{victim.name} is asked to leave")
        world.asked_to_leave.add(victim.name)
        grace_s = _grace(world)
        asked = agent.StopAsked(reason="maintenance", grace_s=grace_s, is_notice=grace_s > 0)
        victim.feed(asked)


def _kill_agent(world: World, fault: Fault) -> None:
    del fault
    victims = [machine for machine in _machines(world) if machine.is_agent_alive]
    if victims:
        victim = world.random.choice(victims)
        world.note(f"kill agent {victim.name}")
        victim.kill_agent()


def _kill_controller(world: World, fault: Fault) -> None:
    del fault
    world.commander.crash()


def _crash_at_append(world: World, fault: Fault) -> None:
    del fault
    world.commander.crash_after = world.random.choice((0, 1, 2, 3, 5, 8))


def _hang_controller(world: World, fault: Fault) -> None:
    world.commander.hang(min(fault.lasts_s, 20.0))


def _second_controller(world: World, fault: Fault) -> None:
    del fault
    world.note("a second controller starts")
    world.start_second_controller()


def _reset_channel(world: World, fault: Fault) -> None:
    del fault
    victims = [process for process in _members(world) if process.channels]
    if victims:
        victim = world.random.choice(victims)
        peer = world.random.choice(sorted(victim.channels))
        world.note(f"reset {victim.name} - {peer}")
        victim.channels[peer].fail("reset")


def _cut_pair(world: World, fault: Fault) -> None:
    machines = _machines(world)
    if len(machines) < 2:
        return
    one, other = world.random.sample(machines, 2)
    _cut(world, one.name, other.name, fault.lasts_s)
    give_up = min(12.0, fault.lasts_s)
    if fault.lasts_s > give_up:
        world.schedule.after(give_up, lambda: _give_up(world, one.name, other.name))


def _cut(world: World, one: str, other: str, lasts_s: float) -> None:
    world.note(f"cut {one} - {other}")
    path = world.path(one, other)
    until = world.schedule.now + round(lasts_s * 1e9)
    world.cuts[path] = max(until, world.cuts.get(path, 0))


def _give_up(world: World, one: str, other: str) -> None:
    for process in _members(world):
        if process.machine != one:
            continue
        for peer, channel in sorted(process.channels.items()):
            if world.processes[peer].machine == other:
                channel.fail("the path is cut")


def _cut_link(world: World, fault: Fault) -> None:
    machines = _machines(world)
    if not machines:
        return
    victim = world.random.choice(machines)
    _cut(world, "controller", victim.name, fault.lasts_s)
    if fault.lasts_s > 6.0:
        world.losses.append(victim.name)
        world.unlink_after(victim, 6.0)


def _pause_worker(world: World, fault: Fault) -> None:
    victims = _members(world)
    if victims:
        world.random.choice(victims).stop_for(min(fault.lasts_s, 2.0))


def _switch(world: World, count: int) -> None:
    state = world.commander.state
    membership = state.membership if state is not None else None
    if membership is None:
        return
    machines = list(membership.machines())
    chosen = world.random.sample(machines, min(count, len(machines)))
    request = SwitchoverRequest(request=f"r{world.next_id()}", machines=tuple(chosen))
    world.note(f"operator: switch over {chosen}")
    world.commander.feed(controller.FromOperator(body=request))


def _stop_boundary(world: World, fault: Fault) -> None:
    del fault
    if world.commander.is_alive:
        world.is_stop_requested = True
        request = StopRequest(request=f"r{world.next_id()}", mode="boundary", grace_s=_grace(world))
        world.commander.feed(controller.FromOperator(body=request))


STRIKES = {
    "kill_worker": _kill_worker,
    "kill_machine": _kill_machine,
    "kill_all_machines": _kill_all_machines,
    "lose_machines": _lose_machines,
    "silence_source": _silence_source,
    "reboot_all_machines": _reboot_all_machines,
    "silence_machine": _silence_machine,
    "freeze_machine": _freeze_machine,
    "stop_worker": _stop_worker,
    "leave_machine": _leave_machine,
    "kill_agent": _kill_agent,
    "kill_controller": _kill_controller,
    "crash_at_append": _crash_at_append,
    "hang_controller": _hang_controller,
    "second_controller": _second_controller,
    "reset_channel": _reset_channel,
    "cut_pair": _cut_pair,
    "cut_link": _cut_link,
    "pause_worker": _pause_worker,
    "switch_one": lambda world, fault: _switch(world, 1),
    "switch_two": lambda world, fault: _switch(world, 2),
    "stop_boundary": _stop_boundary,
}
