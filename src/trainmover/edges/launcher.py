"""Agent's hold on its machine's nursery: launch, kill, and hear of every end.

Decides how processes are started and ended, never whether. A running nursery is adopted (its
agent may have died); else one is started in a session of its own, so that nothing that hits the
agent's process group hits the workers. Every worker is held by a pidfd, so that a number which
the kernel has given to a stranger meanwhile is never signalled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainmover.edges import probes
from trainmover.errors import ProtocolError, RemoteProtocolError, TransportError
from trainmover.protocol.nursery import (
    EndNursery,
    Exited,
    Forked,
    ForkFailed,
    ForkRequest,
    FrameBuffer,
    FromNursery,
    KillGroup,
    NurseryUp,
    decode_from_nursery,
    frame,
)

log = logging.getLogger(__name__)

CONNECT_PAUSE_S = 0.02
PID_WAIT_S = 3.0
GREET_LIMIT_S = 10.0
"""From the connection to the nursery's first word; it listens only once it is warm."""
LAUNCH_LIMIT_S = 15.0
"""From the order to fork to the nursery's answer; a fork takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class NurserySettings:
    """How the nursery of a machine is started."""

    socket: str
    log_path: Path
    entry: str = ""
    """``module:function`` that a worker runs; empty: the training worker."""
    start_timeout_s: float = 120.0
    orphan_timeout_s: float = 60.0
    is_cold: bool = False
    """Do not import torch beforehand (scripts without torch)."""
    environment: dict[str, str] = field(default_factory=dict)
    is_provided: bool = False
    """Somebody else starts the first nursery; one of our own only when that does not come."""
    provision_limit_s: float = 120.0


class Launcher:
    """One machine's workers; notices are handed to `on_notice` on the event loop."""

    def __init__(
        self, settings: NurserySettings, on_notice: Callable[[Forked | ForkFailed | Exited], None]
    ) -> None:
        self._settings = settings
        self._on_notice = on_notice
        self._writer: asyncio.StreamWriter | None = None
        self._pids: dict[str, int] = {}
        self._pidfds: dict[str, int] = {}
        self._pid_known = asyncio.Condition()
        self._waiting: list[ForkRequest] = []
        self._asked: dict[str, asyncio.TimerHandle] = {}
        """Launches that the nursery has not answered."""
        self._given_up: set[str] = set()
        """Launches that were reported as failed: whoever is forked late is not to live."""
        self._nursery_pid = 0
        self.on_spawn: Callable[[int], None] = lambda _: None
        """Told the pid of a nursery just started, long before it is warm."""
        self._reader: asyncio.StreamReader | None = None
        self._is_ending = False
        self._has_been_up = False

    @property
    def nursery_pid(self) -> int:
        """Pid of the connected nursery; 0 while there is none."""
        return self._nursery_pid

    @property
    def pids(self) -> dict[str, int]:
        """Live workers: pid by incarnation."""
        return dict(self._pids)

    async def start(self) -> NurseryUp:
        """Connect to the nursery, started if need be; warm on return. Raises TransportError."""
        self._reader, up = await self._connect()
        return up

    async def run(self) -> None:
        """Receive notices until `end`; a nursery that dies is reported and replaced."""
        buffer = FrameBuffer()
        while not self._is_ending:
            assert self._reader is not None, "start() comes first"
            try:
                data = await self._reader.read(65536)
                messages = [decode_from_nursery(body) for body in buffer.feed(data)]
            except (ConnectionError, ProtocolError) as error:
                log.error("nursery: %s", error)
                data, messages = b"", []
            for message in messages:
                await self._receive(message)
            if not data and not self._is_ending:
                await self._lose_nursery()
                buffer = FrameBuffer()
                self._reader, _ = await self._connect()

    def launch(self, request: ForkRequest) -> None:
        """Fork one worker; answered by `Forked` or `ForkFailed`. Idempotent by incarnation."""
        if not self._ask(request):
            self._waiting.append(request)

    def _ask(self, request: ForkRequest) -> bool:
        is_sent, name = self._send(request), request.incarnation
        if is_sent and name not in self._asked:
            loop = asyncio.get_running_loop()
            self._asked[name] = loop.call_later(LAUNCH_LIMIT_S, self._give_up, name)
        return is_sent

    def _give_up(self, incarnation: str) -> None:
        """A nursery that is stopped would keep whoever ordered the worker from another machine."""
        del self._asked[incarnation]
        self._given_up.add(incarnation)
        reason = f"the nursery has not answered for {LAUNCH_LIMIT_S:g} s"
        log.error("%s is not started: %s", incarnation, reason)
        self._on_notice(ForkFailed(incarnation=incarnation, reason=reason))

    def _forget_asked(self) -> list[str]:
        asked = sorted(self._asked)
        for incarnation in asked:
            self._answered(incarnation)
        return asked

    def _answered(self, incarnation: str) -> None:
        timer = self._asked.pop(incarnation, None)
        if timer is not None:
            timer.cancel()

    def kill(self, incarnation: str) -> None:
        """SIGKILL the worker's process group; answered by `Exited`.

        The nursery, which may be stopped itself, is needed for the answer only.
        """
        self._send(KillGroup(incarnation=incarnation))
        self._kill_directly(incarnation)

    async def pid_of(self, incarnation: str) -> int | None:
        """Pid of a live worker; waits a little for one that is just being forked."""
        try:
            async with asyncio.timeout(PID_WAIT_S), self._pid_known:
                await self._pid_known.wait_for(lambda: incarnation in self._pids)
        except TimeoutError:
            return None
        return self._pids.get(incarnation)

    async def end(self, grace_s: float) -> None:
        """End all workers and the nursery; returns when it is gone or `grace_s` + 5 s are over."""
        self._is_ending = True
        self._forget_asked()
        if not self._send(EndNursery(grace_s=grace_s)) and self._nursery_pid:
            _send_signal(self._nursery_pid, signal.SIGTERM)  # our own child, still warming up
        deadline = asyncio.get_running_loop().time() + grace_s + 5.0
        while self._nursery_pid and _is_running(self._nursery_pid):
            if asyncio.get_running_loop().time() > deadline:
                log.warning("nursery %d does not end: killed", self._nursery_pid)
                _send_signal(self._nursery_pid, signal.SIGKILL)
                break
            await asyncio.sleep(0.01)
        for incarnation in list(self._pids):
            self._kill_directly(incarnation)

    async def disconnect(self) -> None:
        """Leave nursery and workers alone, for another agent to adopt; `run` ends."""
        self._is_ending = True
        self._forget_asked()
        if self._writer is not None:
            self._writer.close()
            await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    # -------------------------------------------------------------------------- connection

    async def _connect(self) -> tuple[asyncio.StreamReader, NurseryUp]:
        process: subprocess.Popen[bytes] | None = None
        loop = asyncio.get_running_loop()
        is_provided = self._settings.is_provided and not self._has_been_up
        spawn_at = loop.time() + (self._settings.provision_limit_s if is_provided else 0.0)
        deadline = spawn_at + self._settings.start_timeout_s
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._settings.socket)
                return await self._greet_in_time(reader, writer)
            except (FileNotFoundError, ConnectionError, asyncio.IncompleteReadError):
                if process is None and loop.time() >= spawn_at:
                    process = self._spawn()
                    self._nursery_pid = process.pid
                    self.on_spawn(process.pid)
                elif process is not None and process.poll() is not None:
                    raise TransportError(self._obituary(process.returncode)) from None
            if loop.time() > deadline and process is not None:
                process.kill()
                limit = self._settings.start_timeout_s
                raise TransportError(f"the nursery was not warm within {limit} s") from None
            await asyncio.sleep(CONNECT_PAUSE_S)

    async def _greet_in_time(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, NurseryUp]:
        try:
            async with asyncio.timeout(GREET_LIMIT_S):
                return await self._greet(reader, writer)
        except TimeoutError:
            writer.close()
            text = f"the nursery at {self._settings.socket} is stopped: it says nothing"
            raise TransportError(f"{text} within {GREET_LIMIT_S:g} s") from None

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, NurseryUp]:
        length = int.from_bytes(await reader.readexactly(4), "big")
        up = decode_from_nursery(await reader.readexactly(length))
        if not isinstance(up, NurseryUp):
            raise RemoteProtocolError(f"expected NurseryUp, got {type(up).__name__}")
        end = writer.get_extra_info("socket")
        pid, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid() or pid != up.pid:
            raise RemoteProtocolError(f"a stranger (pid {pid}, user {uid}) holds the socket")
        self._writer = writer
        self._has_been_up = True
        self._nursery_pid = up.pid
        for worker in up.workers:
            await self._learn(worker.incarnation, worker.pid)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._ask(request)
        return reader, up

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        command = [sys.executable, "-m", "trainmover.worker.nursery", "--socket", settings.socket]
        command += ["--orphan-timeout-s", str(settings.orphan_timeout_s)]
        command += ["--entry", settings.entry] if settings.entry else []
        command += ["--cold"] if settings.is_cold else []
        settings.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(settings.log_path, "ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **settings.environment, "OMP_NUM_THREADS": "1"},
            )

    def _obituary(self, code: int) -> str:
        tail = log_tail(self._settings.log_path, 2000).strip().splitlines()
        last = tail[-1] if tail else "no output"
        return f"the nursery ended with code {code}: {last} (see {self._settings.log_path})"

    async def _receive(self, message: FromNursery) -> None:
        match message:
            case Forked(incarnation=incarnation, pid=pid):
                self._answered(incarnation)
                await self._learn(incarnation, pid)
                if incarnation in self._given_up:
                    self.kill(incarnation)
                else:
                    self._on_notice(message)
            case Exited(incarnation=incarnation):
                self._forget(incarnation)
                self._on_notice(message)
            case ForkFailed(incarnation=incarnation):
                self._answered(incarnation)
                self._on_notice(message)
            case NurseryUp():
                log.info("nursery %d says hello again", message.pid)

    async def _lose_nursery(self) -> None:
        """Workers die with their nursery (PR_SET_PDEATHSIG); say so for each."""
        log.error("nursery %d is gone, and its workers with it", self._nursery_pid)
        self._writer = None
        self._nursery_pid = 0
        for incarnation, pid in sorted(self._pids.items()):
            self._kill_directly(incarnation)
            self._forget(incarnation)
            number = int(signal.SIGKILL)
            self._on_notice(Exited(incarnation=incarnation, pid=pid, exit_code=None, signal=number))
        for incarnation in self._forget_asked():
            reason = "the nursery ended before it was forked"
            self._on_notice(ForkFailed(incarnation=incarnation, reason=reason))

    # -------------------------------------------------------------------------- processes

    def _send(self, message: ForkRequest | KillGroup | EndNursery) -> bool:
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(frame(message))
        return True

    async def _learn(self, incarnation: str, pid: int) -> None:
        if incarnation not in self._pidfds:
            try:
                self._pidfds[incarnation] = os.pidfd_open(pid)
            except ProcessLookupError:
                return  # has ended already; its notice follows
        async with self._pid_known:
            self._pids[incarnation] = pid
            self._pid_known.notify_all()

    def _forget(self, incarnation: str) -> None:
        self._pids.pop(incarnation, None)
        descriptor = self._pidfds.pop(incarnation, None)
        if descriptor is not None:
            os.close(descriptor)

    def _kill_directly(self, incarnation: str) -> None:
        pid, descriptor = self._pids.get(incarnation), self._pidfds.get(incarnation)
        if pid is None or descriptor is None:
            return
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended, and nobody of its group is left


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended by itself


def _is_running(pid: int) -> bool:
    try:
        # A child of ours is a zombie until reaped; a stranger's is looked up.
        done, _ = os.waitpid(pid, os.WNOHANG)
        return done == 0
    except ChildProcessError:
        return probes.process_state(pid) not in ("", "Z", "X")


def log_tail(path: Path | str, limit_bytes: int) -> str:
    """Last `limit_bytes` of a log; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
