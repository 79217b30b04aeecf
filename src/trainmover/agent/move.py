"""One move of the agent's decider while it is being made: state so far, commands so far.

Exists only inside `transition`; from outside the decider stays a function of values.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.agent.state import Command, Phase, State, ToController, Transition, Worker
from trainmover.protocol.messages import FromAgentMessage
from trainmover.units import Duration, Instant, after, seconds

RECENT_LIMIT = 64
"""Messages said once that are said again to the next controller."""


class Move:
    """Collects what one event changes and causes."""

    def __init__(self, state: State, now: Instant) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []
        self.reasons: list[str] = []

    def do(self, command: Command) -> None:
        """Add a command."""
        self.commands.append(command)

    def because(self, reason: str) -> None:
        """Add a clause to the reason."""
        self.reasons.append(reason)

    def enter(self, phase: Phase) -> None:
        """Change the phase."""
        self.state = replace(self.state, phase=phase)

    def keep(self, worker: Worker) -> None:
        """Store a worker, new or changed."""
        workers = {**self.state.workers, worker.incarnation: worker}
        self.state = replace(self.state, workers=workers)

    def forget(self, incarnation: str) -> None:
        """Remove a worker whose process is over."""
        workers = {name: w for name, w in self.state.workers.items() if name != incarnation}
        self.state = replace(self.state, workers=workers)

    def tell(self, body: FromAgentMessage) -> None:
        """To the controller, if it listens; the sender repeats what gets lost."""
        if self.state.is_welcomed:
            self.do(ToController(body=body))

    def tell_surely(self, body: FromAgentMessage) -> None:
        """To the controller now or when it is back: nobody repeats this."""
        if self.state.is_welcomed:
            self.do(ToController(body=body))
            # A controller may be killed between hearing this and writing it down.
            recent = (*self.state.recent, body)[-RECENT_LIMIT:]
            self.state = replace(self.state, recent=recent)
            return
        outbox = (*self.state.outbox, body)[-self.state.config.outbox_limit :]
        self.state = replace(self.state, outbox=outbox)

    def in_(self, delay_s: float) -> Instant:
        """The instant `delay_s` from now."""
        return after(self.now, Duration(seconds(delay_s)))

    def done(self) -> Transition:
        """The finished move."""
        reason = "; ".join(self.reasons)
        return Transition(state=self.state, commands=tuple(self.commands), reason=reason)
