"""Signals to whoever started a job on this host: what they ask for, and telling the controller.

Decides what each means. SIGTERM, SIGUSR1 and SIGHUP are notices: the job is suspended at the next
boundary, in the grace time where one is known, and a repeated notice changes nothing, since
schedulers send several. Ctrl-C (SIGINT) is a person: once the next boundary, twice now, three times
every process is killed. SIGUSR2 asks for a checkpoint, and training goes on. Handlers only count.
"""

from __future__ import annotations

import signal
import time
import types
from collections.abc import Callable
from typing import Any, Final

from trainmover.daemons.grace import Grace
from trainmover.daemons.plan import Screen
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import TrainMoverError
from trainmover.protocol.messages import FromOperatorMessage, SaveRequest, StopRequest

NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
HINT_AFTER_S: Final = 10.0
STOP_NOW_LIMIT_S: Final = 15.0
LAST_S: Final = 0.5
"""Of the grace time: what is left then is killed, or somebody else will do it."""


class StopSignals:
    """Counted by handlers, passed on by the supervisor's loop."""

    def __init__(self, screen: Screen, grace: Grace) -> None:
        self._screen = screen
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._interrupts = 0
        self._notices = 0
        self._saves = 0
        self._saves_sent = 0
        self._first_notice = ""
        self._level_sent = 0
        self._told = 0
        """Process of the controller that has heard of the grace time."""
        self._ends_at: float | None = None
        self._now_since: float | None = None
        self._hint_at: float | None = None
        self._is_over = False

    # ------------------------------------------------------------------ handlers

    def install(self) -> None:
        """Take the signals; what was ignored on purpose (nohup) stays ignored."""
        for number in (signal.SIGINT, signal.SIGUSR2, *NOTICES):
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number != signal.SIGINT and is_ignored:
                continue
            self._before[number] = signal.signal(number, self._count)

    def restore(self) -> None:
        """As they were; a hasty fourth Ctrl-C must not turn the exit code into a traceback."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.level >= 3 else handler)

    def _count(self, number: int, _: types.FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        elif number == signal.SIGUSR2:
            self._saves += 1
        else:
            self._notices += 1
            self._first_notice = self._first_notice or signal.Signals(number).name

    @property
    def level(self) -> int:
        """0: go on, 1: stop at the next boundary, 2: now, 3: kill."""
        return 3 if self._is_over else max(self._interrupts, min(self._notices, 1))

    # ------------------------------------------------------------------ passing on

    def pass_on(self, client: OperatorClient | None, controller_pid: int) -> None:
        """Once per pass of the loop; asks again until the controller has answered."""
        self._watch_clock()
        if client is None:
            return
        if self._saves > self._saves_sent and self.level == 0:
            self._request(client, SaveRequest(request=f"signal-save-{self._saves}"), self._saved)
        wanted = min(self.level, 2)
        is_other = controller_pid != self._told and self._ends_at is not None
        if wanted > self._level_sent or (wanted == 1 and is_other):
            self._stop(client, controller_pid, is_now=wanted == 2)

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if self._notices and self._ends_at is None and (left_s := self._grace.left_s()) > 0:
            self._ends_at = now + left_s
        if self._hint_at is not None and now > self._hint_at:
            self._hint_at = None
            text = f"no boundary within {HINT_AFTER_S:g} s; interrupt again to stop now"
            self._screen.line("warning", text)
        if self._now_since is not None and now - self._now_since > STOP_NOW_LIMIT_S:
            self._is_over = True
        if self._ends_at is not None and now > self._ends_at - LAST_S:
            self._is_over = True

    def _stop(self, client: OperatorClient, controller_pid: int, *, is_now: bool) -> None:
        left_s = 0.0 if self._ends_at is None else max(0.1, self._ends_at - time.monotonic())
        text = "stopping now" if is_now else "stopping at the next boundary"
        if self._first_notice and not is_now:
            left = f"{left_s:.0f} s are left" if left_s else "no grace time is known (--grace)"
            text = f"{self._first_notice}: {text}; {left}"
        self._screen.line("decision", text)
        if is_now and self._now_since is None:
            self._now_since = time.monotonic()
        request = StopRequest(
            request=f"signal-{2 if is_now else 1}-{controller_pid}",
            mode="now" if is_now else "boundary",
            grace_s=0.0 if is_now else left_s,
        )

        def sent() -> None:
            self._level_sent = 2 if is_now else 1
            self._told = controller_pid
            can_hint = not is_now and not self._notices
            self._hint_at = time.monotonic() + HINT_AFTER_S if can_hint else None

        self._request(client, request, sent)

    def _saved(self) -> None:
        self._saves_sent = self._saves

    def _request(
        self, client: OperatorClient, request: FromOperatorMessage, sent: Callable[[], None]
    ) -> None:
        try:
            client.request(request)
        except TrainMoverError as error:
            self._screen.line("warning", f"{error}; trying again")
            return
        sent()
