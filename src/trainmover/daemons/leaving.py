"""How an agent learns that its machine is about to be taken away: signals, or a file.

Decides which words mean that, and how much time is left; what follows is the decider's. The workers
have no part in it: they install no handler, and a script keeps its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from trainmover import agent
from trainmover.daemons.grace import Grace, NoticeFile
from trainmover.daemons.options import AgentOptions

log = logging.getLogger("agent")

NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1)
"""Sent by schedulers, which repeat themselves."""
PERSONS: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class AgentNotices:
    """Of one agent."""

    def __init__(
        self,
        options: AgentOptions,
        settings: Mapping[str, Any],
        ask: Callable[[agent.StopAsked], None],
    ) -> None:
        self._grace = Grace(
            usual_s=float(settings["agent.grace_s"]), ends_at_wall_s=options.ends_at_wall_s
        )
        self._file = NoticeFile(str(settings["agent.notice_file"]), options.machine)
        self._ask = ask

    def take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handlers post an event, nothing else."""
        for number in (*NOTICES, *PERSONS):
            loop.add_signal_handler(number, self._hear, number)
        loop.add_signal_handler(signal.SIGUSR2, log.info, "SIGUSR2 is for who started the job")

    def _hear(self, number: signal.Signals) -> None:
        is_notice = number in NOTICES
        left_s = self._grace.left_s() if is_notice else 0.0
        reason = f"signal {signal.Signals(number).name}"
        self._ask(agent.StopAsked(reason=reason, grace_s=left_s, is_notice=is_notice))

    def look(self) -> None:
        """Once per pulse: whether the file has been written."""
        told_s = self._file.read()
        if told_s is None:
            return
        left_s = told_s or self._grace.left_s()
        reason = f"notice in {self._file.path}"
        self._ask(agent.StopAsked(reason=reason, grace_s=left_s, is_notice=True))
