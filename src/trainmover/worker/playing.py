"""A joiner's way to the newest version of a rank that no live rank is a replica of.

Decides the order: the snapshot that the plan names, the updates since with the optimizer's own
code, then own leaves from the rank's backup and shared ones from a stayer, all of the plan's target
(I9). Whatever does not fit is an error here; the controller then takes another copy, or all ranks
go back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.errors import RemoteProtocolError, StateMismatch, TransportError
from trainmover.protocol.messages import Edge, Plan, Source, Version
from trainmover.state.increment import GradientLayout, Player
from trainmover.worker.personal import Personal

if TYPE_CHECKING:
    from trainmover.worker.increment_store import Increment
    from trainmover.worker.stepper import Stepper


def receive_played(stepper: Stepper, plan: Plan, source: Source) -> None:
    """Stand at the target, or say what failed.

    Called on: the joiner's main thread. Blocks: the transfer's limits.
    """
    peer = source.machine
    try:
        amount = _load_base(stepper, plan, source)
        stepper.host.mark("snapshot loaded")
        peer = source.bulk_from
        amount += _play_all(stepper, plan, source)
        stepper.host.mark("increments played")
        peer = source.own_from
        personal = stepper.host.fetch_personal(plan, stepper.rank)
        _check_version(personal, plan.target)
        peer = source.shared_from
        _load_shared(stepper, plan, personal)
    except (TransportError, StateMismatch, RemoteProtocolError) as error:
        # Half-loaded state does no harm: the next plan loads all of it again. What does not fit
        # together is no connection's fault; the controller learns that by an empty name.
        is_misfit = not isinstance(error, TransportError) and peer != source.machine
        stepper.host.failed(plan, Edge(peer="" if is_misfit else peer, reason=str(error)))
        return
    stepper.host.mark("own received")
    stepper.roles.put_own(personal, plan.target)
    stepper.snapshots.begun_at(plan.target.step)
    stepper.host.received(plan, amount)


def _load_base(stepper: Stepper, plan: Plan, source: Source) -> int:
    side = stepper.host.snapshots
    assert side is not None
    assert source.base is not None
    with side.open_source(source, source.base, stepper.host.errand(plan)) as fetch:
        amount = stepper.snapshots.load(fetch.description, fetch.read, fetch.bulk_digest)
        fetch.end()
    for name, data in stepper.snapshots.personal_of(fetch.description).smalls:
        stepper.inventory.load_small(name, data)  # plain optimizer state may be a rank's own
    return amount


def _play_all(stepper: Stepper, plan: Plan, source: Source) -> int:
    """Updates from the source's snapshot to the target; bytes of them."""
    side = stepper.host.increments
    assert side is not None
    side.store.void(stepper.rank)
    amount = 0
    at = source.base
    player: Player | None = None
    with side.fetching(plan, stepper.rank) as increments:
        for increment in increments:
            if increment.head.base != at:
                raise StateMismatch(f"an update of step {increment.head.base.step} is next")
            player = player or _player(stepper)
            _play(stepper, player, increment)
            at = increment.head.version
            amount += increment.head.bulk_bytes
            side.store.add(increment)
    if at != plan.target:
        raise StateMismatch(f"the updates end at step {0 if at is None else at.step}")
    return amount


def _player(stepper: Stepper) -> Player:
    optimizers = stepper.inventory.optimizers
    if len(optimizers) != 1:
        raise StateMismatch(f"updates of one optimizer, {len(optimizers)} are tracked here")
    return Player("optimizer", optimizers[0], GradientLayout(optimizers[0]))


def _play(stepper: Stepper, player: Player, increment: Increment) -> None:
    head = increment.head
    if stepper.inventory.parameter_digest() != head.base_digest:
        raise StateMismatch(
            f"playing the updates of rank {stepper.rank} again gave other parameters at step "
            f"{head.base.step} than the rank had"
        )
    if increment.block is None:
        return
    stepper.increments.is_playing = True
    try:
        player.play(head, increment.block)
    finally:
        stepper.increments.is_playing = False


def _check_version(personal: Personal, target: Version) -> None:
    if personal.version.step != target.step:
        text = f"personal state at version {target.step}, got {personal.version.step}"
        raise StateMismatch(f"expected {text}")


def _load_shared(stepper: Stepper, plan: Plan, personal: Personal) -> None:
    own = {name for name, _ in personal.smalls}
    for name, data in stepper.host.fetch_shared(plan, stepper.rank):
        if name not in own:
            stepper.inventory.load_small(name, data)
