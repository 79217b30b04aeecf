"""What must hold in every state of the controller, whatever happened before.

Numbered like the protocol's where they are the same. Checked after each event in the simulation;
cheap enough for production, where the daemon writes violations into its log.
"""

from __future__ import annotations

from trainmover.controller import lookup
from trainmover.controller.state import (
    Ended,
    Flagged,
    Freezing,
    Gathering,
    Preparing,
    State,
    Switching,
)
from trainmover.controller.timers import next_deadline


def violations(state: State) -> tuple[str, ...]:
    """Broken invariants by number and text; empty when all hold."""
    found: list[str] = []
    _check_membership(state, found)
    _check_numbers(state, found)
    _check_seats(state, found)
    if next_deadline(state) is None and not isinstance(state.phase, Ended):
        found.append("I12: no deadline is pending")
    return tuple(found)


def _check_membership(state: State, found: list[str]) -> None:
    if state.membership is None:
        return
    names = lookup.member_names(state)
    if len(set(names)) != len(names):
        found.append("CI-1: one worker plays two ranks")
    if state.membership.world_size != state.spec.world_size:
        found.append("CI-2: the world has another size than the job's (P1)")
    for member in state.membership.members:
        worker = state.workers.get(member.incarnation)
        if member.rank != state.membership.members.index(member):
            found.append(f"CI-2: rank {member.rank} is out of place")
        local_rank = lookup.local_rank_of(state, member.rank)
        if worker is not None and worker.local_rank != local_rank:
            found.append(f"CI-3: rank {member.rank} has changed its local rank (P1)")
        if worker is not None and worker.role not in {"member", "ending"}:
            found.append(f"CI-4: member {member.incarnation} has the role {worker.role}")


def _check_numbers(state: State, found: list[str]) -> None:
    match state.phase:
        case Preparing(plan=plan) | Flagged(plan=plan) | Switching(plan=plan):
            number = plan.number
            if plan.membership.generation != number:
                found.append(f"I6: plan {number} has a membership of another number")
            if plan.base_generation != state.generation:
                found.append(f"I6: plan {number} is not based on generation {state.generation}")
        case Freezing(number=number) | Gathering(number=number):
            pass
        case _:
            return
    if not state.generation < number <= state.highest_number:
        found.append(f"I6: number {number} is not above generation {state.generation}")


def _check_seats(state: State, found: list[str]) -> None:
    if not isinstance(state.phase, Gathering):
        return
    given = [seat.incarnation for seat in state.phase.seats if seat.incarnation]
    if len(set(given)) != len(given):
        found.append("CI-5: one joiner has two seats (C98)")
    for name in given:
        if name in lookup.member_names(state):
            found.append(f"CI-5: member {name} is given another seat")
