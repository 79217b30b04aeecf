"""What the communicator tells this worker, handed to the lifecycle and to the open cut-over.

All methods run on the I/O thread. Decides nothing but what is not worth an event: a gate result
that reaches a fenced worker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from trainmover.communicator.settings import ChannelCount as SwappedChannels
from trainmover.errors import CollectiveMismatch, RemoteProtocolError
from trainmover.protocol.messages import ChannelCount, Edge
from trainmover.worker import events, mistakes
from trainmover.worker.personal import INCREMENT, INCREMENT_BYTES, PERSONAL

if TYPE_CHECKING:
    from trainmover.worker.runtime import Runtime

LOOK_AGAIN_S = 0.5
"""Pause between two looks whether a script is in a step that a peer will never run."""


class ChannelEvents:
    """Implements the communicator's `CommunicatorEvents`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def channel_broken(self, generation: int, peer: str, reason: str) -> None:
        """A channel of the current generation ended."""
        edge = Edge(peer=peer, reason=reason)
        self._runtime.dispatch(events.ChannelBroken(generation=generation, edge=edge))

    def poisoned(self, generation: int, peer: str, edges: tuple[tuple[str, str], ...]) -> None:
        """A peer has marked the generation broken.

        The failed edges are told to the controller by their own ends: repeated by others they
        would look like edges of those (a cut between two must not look like one dead rank).
        """
        self._runtime.dispatch(events.Poisoned(generation=generation, peer=peer))

    def gate_completed(self, generation: int, step: int, kind: int, flags: tuple[int, ...]) -> None:
        """All rounds are in.

        W5: a process that was stopped finds the frames of its last gate in its own buffers when it
        wakes up; its agent has fenced it by then, and the gate passes for nobody.
        """
        if self._runtime.page.fence_generation not in (0, generation):
            return
        self._runtime.dispatch(
            events.GateCompleted(generation=generation, step=step, kind=kind, vector=flags)
        )

    def gate_mismatch(self, generation: int, step: int, detail: str) -> None:
        """Ranks are at different kinds of gate: loops of unequal length, or other names."""
        self._script_fault(mistakes.with_remedy(detail))

    def peer_finished(self, generation: int, rank: int, step: int) -> None:
        """A peer waits in the gate behind its loop. If this rank's script is in that step, it will
        wait for the peer in a collective for ever: tell it as what it is."""
        stepper = self._runtime.stepper
        if stepper is None or generation != self._runtime.host.generation:
            return
        if stepper.version.step > step or stepper.phase == "finished":
            return
        if stepper.version.step == step and stepper.phase == "gate":
            return  # the gate itself tells whether both are behind the loop
        if stepper.entered == step and stepper.phase == "running":
            self._script_fault(mistakes.left_alone(rank, step))
            return
        again = partial(self.peer_finished, generation, rank, step)
        self._runtime.engine.call_later(LOOK_AGAIN_S, again)

    def mismatch(self, error: CollectiveMismatch) -> None:
        """Ranks called different collectives."""
        self._script_fault(str(error))

    def _script_fault(self, text: str) -> None:
        stepper = self._runtime.stepper
        self._runtime.dispatch(
            events.MainFailed(
                rank=stepper.rank if stepper is not None else -1,
                step=stepper.step_index if stepper is not None else 0,
                text=text,
                error=text,
                was_running_out=self._runtime.host.is_running_out,
                is_machine_caused=False,
            )
        )

    def control(
        self, from_rank: int, kind: int, generation: int, step: int, payload: bytes
    ) -> None:
        """A message of a peer: personal state, or the increment in front of it."""
        increments = self._runtime.increments
        if kind in (INCREMENT, INCREMENT_BYTES):
            increments.arrived(from_rank, kind, generation, payload)
            return
        if kind != PERSONAL:
            raise RemoteProtocolError(f"rank {from_rank} sent a control frame of kind {kind}")
        held = self._runtime.store.put(payload)
        begin = increments.store.begin_of(held.owner_rank, held.version)
        held = msgspec.structs.replace(held, replay_from=begin)
        self._runtime.dispatch(events.PersonalReceived(held=held))
        if self._runtime.cut is not None:
            self._runtime.cut.personal_received(generation)

    def next_generation_frame(self, generation: int) -> None:
        """A peer runs in the next generation already."""
        self._runtime.dispatch(events.NextGenerationFrame(generation=generation))

    def prepared(self, generation: int) -> None:
        """Channels of a phase one are open."""
        for run in (self._runtime.phase_one, self._runtime.cut):
            if run is not None and run.plan.number == generation:
                run.channels_prepared()

    def prepare_failed(self, generation: int, peer: str, reason: str) -> None:
        """A channel could not be opened."""
        for run in (self._runtime.phase_one, self._runtime.cut):
            if run is not None and run.plan.number == generation:
                run.failed(Edge(peer=peer, reason=reason))

    def cut_over_done(self, generation: int, channels: SwappedChannels) -> None:
        """Channels are swapped."""
        if self._runtime.cut is not None and self._runtime.cut.plan.number == generation:
            self._runtime.cut.channels_swapped(
                ChannelCount(
                    inherited=channels.inherited, opened=channels.opened, closed=channels.closed
                )
            )

    def cut_over_failed(self, generation: int, peer: str, reason: str) -> None:
        """A MARK did not come."""
        if self._runtime.cut is not None and self._runtime.cut.plan.number == generation:
            self._runtime.cut.failed(Edge(peer=peer, reason=reason))

    def stream_accepted(self, purpose: str, generation: int, peer: str, stream: Any) -> None:
        """A joiner asks for state."""
        self._runtime.exchange.serve(purpose, generation, peer, stream)
