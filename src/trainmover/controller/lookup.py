"""Questions about the state that several handlers ask. Pure functions, no decisions."""

from __future__ import annotations

import re
from functools import lru_cache

from trainmover.controller.state import Machine, State, Worker
from trainmover.protocol.messages import Facts, Plan
from trainmover.topology import Member, Membership


@lru_cache(maxsize=65_536)
def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key under which m2 comes before m10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def machine_count(state: State) -> int:
    """Machines that play ranks."""
    return state.spec.world_size // state.spec.workers_per_machine


def members(state: State) -> tuple[Member, ...]:
    """Members of the committed generation, by rank."""
    return state.membership.members if state.membership is not None else ()


def member_names(state: State) -> tuple[str, ...]:
    """Their incarnations."""
    return tuple(member.incarnation for member in members(state))


def ranks_on(membership: Membership | None, machine: str) -> tuple[int, ...]:
    """Ranks that `machine` plays."""
    if membership is None:
        return ()
    return tuple(member.rank for member in membership.members if member.machine == machine)


def is_usable(machine: Machine) -> bool:
    """Whether workers may be launched and used there."""
    return (
        machine.is_linked
        and bool(machine.agent)
        and not (machine.is_leaving or machine.is_retired or machine.is_lost)
    )


def usable_machines(state: State) -> tuple[Machine, ...]:
    """In natural order."""
    names = sorted(state.machines, key=natural_order)
    return tuple(state.machines[name] for name in names if is_usable(state.machines[name]))


def workers_on(state: State, machine: str) -> tuple[Worker, ...]:
    """Every worker there whose end is not known."""
    names = sorted(state.workers)
    return tuple(state.workers[name] for name in names if state.workers[name].machine == machine)


def standbys(state: State) -> tuple[Worker, ...]:
    """Workers without a rank on usable machines, in natural order."""
    names = sorted(state.workers, key=natural_order)
    found = [state.workers[name] for name in names]
    return tuple(
        worker
        for worker in found
        if worker.role == "standby" and is_usable(state.machines[worker.machine])
    )


def is_ready(worker: Worker) -> bool:
    """Whether a standby can join at once."""
    return worker.role == "standby" and worker.readiness is not None and not worker.reason


def local_rank_of(state: State, rank: int) -> int:
    """Place of `rank` on its machine: never changes (P1)."""
    return rank % state.spec.workers_per_machine


def identity_of(state: State, rank: int) -> str:
    """Identity of the bulk state of `rank`; empty where it is not known."""
    return state.identities[rank] if rank < len(state.identities) else ""


def participants(plan: Plan) -> tuple[str, ...]:
    """Whose Done a plan needs: members, and the leavers of a planned one, which serve state."""
    names = tuple(member.incarnation for member in plan.membership.members)
    return names + plan.leavers if plan.kind == "planned" else names


def difference(expected: Facts, seen: Facts) -> str:
    """Names what must be equal and is not; empty when nothing."""
    wanted, got = dict(expected.must_equal), dict(seen.must_equal)
    unequal = [
        f"{name}: expected {wanted[name]}, has {got[name]}"
        for name in sorted(wanted)
        if name in got and wanted[name] != got[name]
    ]
    return "; ".join(unequal)


def known_step(state: State) -> int:
    """Highest step that some rank is known to be in."""
    return max(state.step, state.target.step, state.progress_gate + 1)
