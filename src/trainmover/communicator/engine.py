"""The I/O thread: readiness, timers and submitted calls, nothing else.

Decides in which order callbacks run and on which thread; knows no frame, channel or generation.
One engine per worker process. Its `lock` guards the communicator's state: callbacks take it for
short stretches, a calling thread may take it to start a collective itself (saves a thread switch
per small message), and a fork waits for it, so that a child never inherits it half-way.

A thread that has nothing to do but wait for a future *leads*: it does the reading of channels
itself, and the I/O thread sleeps on. Two thread switches per message are saved. So there are two
epoll sets: `_inner` holds what any thread may serve, and is itself a member of `_outer`, which only
the I/O thread waits for and where the inner one is masked while somebody leads.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from trainmover.errors import LocalProtocolError

THREAD_NAME = "trainmover-io"

_LONGEST_POLL_S = 5.0
_READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_WRITE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR


class Timer:
    """A call due at an instant of the monotonic clock; `cancel` from any thread."""

    __slots__ = ("due", "fn", "is_cancelled")

    def __init__(self, due: float, fn: Callable[[], None]) -> None:
        self.due = due
        self.fn = fn
        self.is_cancelled = False

    def cancel(self) -> None:
        """The call will not be made (unless it runs right now)."""
        self.is_cancelled = True


class _Watch:
    __slots__ = ("poller", "on_readable", "on_writable")

    def __init__(
        self,
        poller: select.epoll,
        on_readable: Callable[[], None],
        on_writable: Callable[[], None] | None,
    ) -> None:
        self.poller = poller
        self.on_readable = on_readable
        self.on_writable = on_writable


def _report_nowhere(error: BaseException) -> None:
    raise error


class Engine:
    """One epoll loop on one named thread, whose place a waiting thread may take."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on_fatal: Callable[[BaseException], None] = _report_nowhere
        self.at_fork_in_child: list[Callable[[], None]] = []
        """Closers of whatever lives on this engine; run in a forked child."""
        self._outer, self._inner = select.epoll(), select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._leader_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inner_fd = self._inner.fileno()
        self._outer.register(self._wake_fd, select.EPOLLIN)
        self._outer.register(self._inner_fd, select.EPOLLIN)
        self._inner.register(self._leader_fd, select.EPOLLIN)
        self._watches: dict[int, _Watch] = {}
        self._submitted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        self._is_stopping = False
        self._is_forked = False
        self._turn = threading.Lock()
        self._lead = threading.Lock()
        self._leader_id = 0
        self._led: deque[Callable[[], None]] = deque()
        self._is_serving = False
        _ENGINES.add(self)

    def start(self) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise LocalProtocolError("the engine was started twice")
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let the thread end after the calls already submitted; waits up to `timeout_s`."""
        self._is_stopping = True
        if self._thread is None or self._is_forked:
            return
        self._wake()
        if not self.on_thread():
            self._thread.join(timeout_s)

    def submit(self, fn: Callable[[], None]) -> None:
        """Run `fn` soon on the I/O thread; from any thread."""
        self._submitted.append(fn)
        if not self.on_thread():
            self._wake()

    def call_later(self, delay_s: float, fn: Callable[[], None]) -> Timer:
        """Run `fn` on the I/O thread after `delay_s`; from any thread."""
        timer = Timer(time.monotonic() + delay_s, fn)
        with self.lock:
            heapq.heappush(self._timers, (timer.due, next(self._timer_ids), timer))
        if not self.on_thread():
            self._wake()
        return timer

    def watch(
        self,
        fd: int,
        on_readable: Callable[[], None],
        on_writable: Callable[[], None] | None = None,
        *,
        want_write: bool = False,
        can_be_led: bool = False,
    ) -> None:
        """Call `on_readable` whenever `fd` is readable or broken.

        With `can_be_led` it may be called on a waiting thread, too, never on two at a time.
        """
        poller = self._inner if can_be_led else self._outer
        self._watches[fd] = _Watch(poller, on_readable, on_writable)
        poller.register(fd, _READ | (_WRITE if want_write else 0))

    def modify(self, fd: int, want_write: bool, want_read: bool = True) -> None:
        """Choose what readiness of a watched `fd` is of interest."""
        wanted = (_READ if want_read else 0) | (_WRITE if want_write else 0)
        self._watches[fd].poller.modify(fd, wanted)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; call before closing it."""
        watch = self._watches.pop(fd, None)
        if watch is not None:
            watch.poller.unregister(fd)

    def try_turn(self) -> bool:
        """Keep the I/O thread from running callbacks until `end_turn`, if it runs none now.

        Called on: another thread, without the lock. False, too, where something submitted waits:
        it would be overtaken.
        """
        if not self._turn.acquire(blocking=False):
            return False
        if self._submitted:
            self._turn.release()
            return False
        return True

    def end_turn(self) -> None:
        """The I/O thread may go on."""
        self._turn.release()

    # -- leading -------------------------------------------------------------

    def wait(self, future: torch.futures.Future[Any]) -> None:
        """Block until `future` is complete, and serve the channels meanwhile where possible.

        Called on: any thread, without the lock. Only one leads; others, and threads whose torch
        modes would see our arithmetic, leave the work to the one that does or to the I/O thread.
        """
        if future.done():
            return
        if self.on_thread() or _has_modes() or not self._lead.acquire(blocking=False):
            future.wait()
            return
        has_grad = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            self._leader_id = threading.get_ident()
            self._outer.modify(self._inner_fd, 0)
            while not future.done():
                self._serve(self._inner.poll(_LONGEST_POLL_S))
        finally:
            self._leader_id = 0
            self._outer.modify(self._inner_fd, select.EPOLLIN)
            torch._C._set_grad_enabled(has_grad)
            self._lead.release()

    def _serve(self, found: list[tuple[int, int]]) -> None:
        with self._turn:
            try:
                self._is_serving = True
                for fd, ready in found:
                    self._dispatch(fd, ready)
                while self._led:
                    self._led.popleft()()
            except BaseException as error:
                self.on_fatal(error)
                raise
            finally:
                self._is_serving = False

    def soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` at the end of the turn under way on this thread, else on the I/O thread."""
        if self._is_serving and self._leader_id == threading.get_ident():
            self._led.append(fn)
        else:
            self.submit(fn)

    def completed(self) -> None:
        """A future was completed: the leader may be the one that waits for it."""
        if self._leader_id and self._leader_id != threading.get_ident():
            os.eventfd_write(self._leader_fd, 1)

    @property
    def is_running(self) -> bool:
        """Whether the I/O thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def on_thread(self) -> bool:
        """Whether the caller is the I/O thread."""
        return threading.get_ident() == self._thread_id

    # -- the loop ------------------------------------------------------------

    def _wake(self) -> None:
        if not self._is_forked:
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        torch.set_grad_enabled(False)  # thread-local: our arithmetic is never recorded
        while not (self._is_stopping and not self._submitted):
            try:
                self._take_turn()
            except BaseException as error:
                self.on_fatal(error)
                return

    def _take_turn(self) -> None:
        found = self._outer.poll(self._delay_s())
        with self._turn:
            for fd, ready in found:
                self._dispatch(fd, ready)
            for _ in range(len(self._submitted)):
                self._submitted.popleft()()
            self._fire_timers()

    def _dispatch(self, fd: int, ready: int) -> None:
        watch = self._watches.get(fd)
        if watch is None:  # one of our own, or unwatched by a callback of the same turn
            self._dispatch_own(fd)
            return
        if ready & select.EPOLLOUT and watch.on_writable is not None:
            watch.on_writable()
        if ready & ~select.EPOLLOUT and self._watches.get(fd) is watch:
            watch.on_readable()

    def _dispatch_own(self, fd: int) -> None:
        if fd == self._inner_fd:
            for led, ready in self._inner.poll(0):
                self._dispatch(led, ready)
        elif fd in (self._wake_fd, self._leader_fd):
            try:
                os.eventfd_read(fd)
            except BlockingIOError:
                pass  # read already, by the other thread

    def _delay_s(self) -> float:
        if self._submitted or self._is_stopping:
            return 0.0
        with self.lock:
            while self._timers and self._timers[0][2].is_cancelled:
                heapq.heappop(self._timers)
            if not self._timers:
                return _LONGEST_POLL_S
            return min(_LONGEST_POLL_S, max(0.0, self._timers[0][0] - time.monotonic()))

    def _fire_timers(self) -> None:
        now = time.monotonic()
        while True:
            with self.lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                timer = heapq.heappop(self._timers)[2]
            if not timer.is_cancelled:
                timer.fn()

    # -- fork ----------------------------------------------------------------

    def _become_child(self) -> None:
        """Drop everything a child must not keep open: peers shall see the parent's death."""
        self.lock = threading.RLock()
        self._turn = threading.Lock()
        self._lead = threading.Lock()
        self._leader_id = 0
        self._is_forked = True
        self._is_stopping = True
        self._thread_id = 0
        for close in self.at_fork_in_child:
            close()
        self._watches.clear()
        self._submitted.clear()
        self._led.clear()
        self._outer.close()
        self._inner.close()
        os.close(self._wake_fd)
        os.close(self._leader_fd)


def _has_modes() -> bool:
    """Whether arithmetic on this thread is not plain: recorded, faked or frozen by the caller."""
    counts = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    return any(counts) or torch.is_inference_mode_enabled()


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_HELD: list[threading.RLock] = []


def _before_fork() -> None:
    for engine in list(_ENGINES):
        engine.lock.acquire()
        _HELD.append(engine.lock)


def _after_fork_in_parent() -> None:
    while _HELD:
        _HELD.pop().release()


def _after_fork_in_child() -> None:
    _HELD.clear()
    for engine in list(_ENGINES):
        engine._become_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
