"""Whether ranks whose state has equal names and shapes really hold the same values.

Stages of a pipeline that number their layers from 0, and experts named alike on every rank, look
like replicas of each other and are none: a joiner would be given another rank's parameters. Where
names say "equal" and values before the first step say "different", the values become part of the
identity. Ranks that also start from equal values can't be told apart here; the digests of every
switchover do that where more than one of them stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from trainmover.state.tensors import bytes_digest

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


NEAR: Final = 8
"""Replicas that are remembered before and behind a rank: one on another machine is enough."""


def confirm_replicas(stepper: Stepper) -> None:
    """Tell ranks apart that have equal names and other values.

    Called on: every rank, at the end of building. Collective: one all-gather of two numbers.
    """
    if not stepper.host.is_managed or stepper.world_size == 1:
        return
    inventory = stepper.inventory
    values = inventory.parameter_digest()
    own = torch.tensor([bytes_digest(inventory.identity.encode()), values], dtype=torch.int64)
    everybody = torch.empty(stepper.world_size * 2, dtype=torch.int64)
    dist.all_gather_into_tensor(everybody, own)
    if stepper.host.is_tainted:
        return  # what was built is void, or a standby's
    pairs = everybody.view(-1, 2)
    alike = pairs[pairs[:, 0] == own[0]]
    if bool((alike[:, 1] != own[1]).any()):
        inventory.tell_apart(values)
    if not stepper.is_shadow:  # alone, everybody looks like oneself
        equal = (pairs == own).all(dim=1).nonzero().view(-1).tolist()
        stepper.increments.replicas = _some(equal, stepper.rank)


def _some(ranks: list[int], own: int) -> tuple[int, ...]:
    """Of many replicas those whose ranks follow: consecutive ranks may share a machine."""
    others = [rank for rank in ranks if rank > own] + [rank for rank in ranks if rank < own]
    return (*others[:NEAR], *others[-NEAR:]) if len(others) > 2 * NEAR else tuple(others)
