"""Warm process of a machine that forks its workers: `python -m trainmover.worker.nursery`.

It imports torch, builds an optimizer and takes one tiny step, so that a worker (also one respawned
in place) starts within milliseconds. It then serves its agent on a unix socket, reaps what it
forked, and kills the process group of a worker that has ended before it says so (DataLoader workers
would keep the dead one's sockets open). It outlives its agent, and ends with all workers when no
agent has been connected for `--orphan-timeout-s`.

Decides nothing about the job. One thread only: a fork of a process with threads could deadlock in
the child; where a library has started one, workers are started by fork and exec instead.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.nursery import (
    EndNursery,
    Exited,
    Forked,
    ForkedWorker,
    ForkFailed,
    ForkRequest,
    FrameBuffer,
    KillGroup,
    NurseryUp,
    decode_request,
    decode_to_nursery,
    frame,
)
from trainmover.worker.fork import become_worker, die_with_parent, redirect, start_by_exec

DEFAULT_ENTRY: Final = "trainmover.worker.process:run_worker"
NEEDED_FIRST: Final = (
    "torch",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer would import it
)
KEPT_EXITS: Final = 256
SEND_LIMIT_S: Final = 2.0


def warm_up(entry: str) -> float:
    """Import and run once what every script needs first; seconds taken. The RNG stays as it was."""
    began = time.monotonic()
    # Next to nothing of what an import makes is garbage, and looking for it takes a fifth of the
    # time; frozen, it is not looked through again in any of the forks either.
    gc.disable()
    try:
        _import_all(entry)
    finally:
        gc.freeze()
        gc.enable()
    _run_once()
    return time.monotonic() - began


def _import_all(entry: str) -> None:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for module in NEEDED_FIRST:
        importlib.import_module(module)
    importlib.import_module(entry.partition(":")[0])


def _run_once() -> None:
    import torch

    torch.set_num_threads(1)
    random_state = torch.get_rng_state()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not torch.cuda.is_available():
        # With a device present, backward starts one thread per device: no fork after that.
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    torch.set_rng_state(random_state)


def thread_count() -> int:
    """Threads of this process as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))


class Nursery:
    """Serves agents on one socket, one thread, until told to end or orphaned."""

    def __init__(self, listener: socket.socket, entry: str, orphan_timeout_s: float) -> None:
        self._listener = listener
        self._entry = entry
        self._orphan_timeout_s = orphan_timeout_s
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, FrameBuffer] = {}
        self._workers: dict[int, ForkedWorker] = {}
        self._exited: list[Exited] = []
        self._alone_since = time.monotonic()
        self._ending_at: float | None = None
        self._warm_seconds = 0.0
        self._wake_read, self._wake_write = socket.socketpair()

    def serve(self, warm_seconds: float) -> None:
        """Until ended; all workers are dead and reaped on return."""
        self._warm_seconds = warm_seconds
        for end in (self._listener, self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end(0.0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # shared pages stay shared in the forks
        while self._ending_at is None or self._workers:
            self._pass(self._wait_s())
        for client in list(self._clients):
            self._drop(client)

    def _wait_s(self) -> float:
        limits = [5.0]
        if not self._clients:
            limits.append(self._alone_since + self._orphan_timeout_s - time.monotonic())
        if self._ending_at is not None:
            limits.append(max(self._ending_at - time.monotonic(), 0.05))
        return max(0.0, min(limits))

    def _pass(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            source = key.fileobj
            if source is self._listener:
                self._accept()
            elif source is self._wake_read:
                self._wake_read.recv(4096)
            elif isinstance(source, socket.socket):
                self._read(source)
        self._reap()
        if self._ending_at is not None and time.monotonic() >= self._ending_at:
            for worker in self._workers.values():
                _kill_group(worker.pid, signal.SIGKILL)
        is_orphan = not self._clients and self._ending_at is None
        if is_orphan and time.monotonic() - self._alone_since > self._orphan_timeout_s:
            print(f"no agent for {self._orphan_timeout_s} s: ending all workers", file=sys.stderr)
            self._end(0.0)

    def _end(self, grace_s: float) -> None:
        self._ending_at = time.monotonic() + grace_s
        for worker in self._workers.values():
            _kill_group(worker.pid, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)

    # -------------------------------------------------------------------------- agents

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            client.close()
            return
        client.settimeout(SEND_LIMIT_S)
        self._clients[client] = FrameBuffer()
        self._selector.register(client, selectors.EVENT_READ)
        up = NurseryUp(
            pid=os.getpid(),
            workers=tuple(self._workers.values()),
            warm_seconds=self._warm_seconds,
            thread_count=thread_count(),
        )
        self._send(client, frame(up) + b"".join(map(frame, self._exited)))

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(65536)
            bodies = self._clients[client].feed(data)
            messages = [decode_to_nursery(body) for body in bodies]
        except (OSError, RemoteProtocolError) as error:
            print(f"an agent's connection ended: {error}", file=sys.stderr)
            self._drop(client)
            return
        if not data:
            self._drop(client)
        for message in messages:
            self._obey(message)

    def _obey(self, message: ForkRequest | KillGroup | EndNursery) -> None:
        match message:
            case ForkRequest():
                self._fork(message)
            case KillGroup(incarnation=incarnation):
                self._kill(incarnation)
            case EndNursery(grace_s=grace_s):
                self._end(grace_s)

    def _kill(self, incarnation: str) -> None:
        for worker in self._workers.values():
            if worker.incarnation == incarnation:
                _kill_group(worker.pid, signal.SIGKILL)
                return
        for exit_notice in self._exited:
            if exit_notice.incarnation == incarnation:
                self._tell(exit_notice)

    def _tell(self, message: NurseryUp | Forked | ForkFailed | Exited) -> None:
        data = frame(message)
        for client in list(self._clients):
            self._send(client, data)

    def _send(self, client: socket.socket, data: bytes) -> None:
        try:
            client.sendall(data)
        except OSError as error:
            print(f"an agent does not read any more: {error}", file=sys.stderr)
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        if self._clients.pop(client, None) is None:
            return
        self._selector.unregister(client)
        client.close()
        self._alone_since = time.monotonic()

    # -------------------------------------------------------------------------- workers

    def _fork(self, request: ForkRequest) -> None:
        for worker in self._workers.values():
            if worker.incarnation == request.incarnation:
                pid = worker.pid
                break
        else:
            try:
                pid = self._start(request)
            except OSError as error:
                reason = f"the process could not be started: {error}"
                self._tell(ForkFailed(incarnation=request.incarnation, reason=reason))
                return
            worker = ForkedWorker(
                incarnation=request.incarnation, local_rank=request.local_rank, pid=pid
            )
            self._workers[pid] = worker
        self._tell(Forked(incarnation=request.incarnation, local_rank=request.local_rank, pid=pid))

    def _start(self, request: ForkRequest) -> int:
        if thread_count() > 1:
            return start_by_exec(request, self._entry)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave_parent_behind()
            become_worker(request, self._entry, parent)
        try:
            os.setpgid(pid, pid)  # both sides do it: whoever comes first
        except (PermissionError, ProcessLookupError):
            return pid  # the child was faster, or has ended already
        return pid

    def _leave_parent_behind(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for end in (self._listener, self._wake_read, self._wake_write, *self._clients):
            end.close()

    def _reap(self) -> None:
        for pid in list(self._workers):
            # Look without reaping: until then nobody else can get the number of the group.
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                continue
            _kill_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            worker = self._workers.pop(pid)
            notice = Exited(
                incarnation=worker.incarnation,
                pid=pid,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
            self._exited = [*self._exited, notice][-KEPT_EXITS:]
            self._tell(notice)


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return  # the group has no member any more


def listen(path: str) -> socket.socket:
    """The unix socket at `path`, in a directory that whoever started us has made.

    Raises FileNotFoundError where it is gone again: so is the job then.
    """
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(8)
    return listener


def serve(path: str, options: argparse.Namespace, warm_seconds: float) -> int:
    """Be the nursery at `path` until ended."""
    try:
        listener = listen(path)
    except FileNotFoundError:
        print(f"{Path(path).parent} is gone: its job ended while this started", file=sys.stderr)
        return 1
    Nursery(listener, options.entry, options.orphan_timeout_s).serve(warm_seconds)
    Path(path).unlink(missing_ok=True)
    try:
        Path(path).parent.rmdir()
    except OSError:
        return 0  # others still use it
    return 0


def serve_each(options: argparse.Namespace, warm_seconds: float) -> int:
    """Fork one nursery per socket, each in a session of its own, and reap them.

    For machines played on one host: warming up once saves seconds of every start. We end with
    whoever started us; the nurseries live on until their agents end them.
    """
    for path, log_path in zip(options.socket, options.log, strict=True):
        if os.fork() == 0:
            os.setsid()
            redirect(log_path)
            os._exit(serve(path, options, warm_seconds))
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return 0


def main(arguments: list[str] | None = None) -> int:
    """Command line of the process."""
    parser = argparse.ArgumentParser(prog="trainmover.worker.nursery")
    parser.add_argument("--socket", action="append", default=[])
    parser.add_argument("--log", action="append", default=[], help="one per socket, if several")
    parser.add_argument("--entry", default=DEFAULT_ENTRY)
    parser.add_argument("--orphan-timeout-s", type=float, default=60.0)
    parser.add_argument("--cold", action="store_true", help="do not import torch beforehand")
    parser.add_argument("--child", action="store_true", help="be a worker; request on stdin")
    options = parser.parse_args(arguments)
    if options.child:
        (body,) = FrameBuffer().feed(sys.stdin.buffer.read())
        become_worker(decode_request(body), options.entry, os.getppid())
    if options.log:
        die_with_parent()  # from now on: warming up takes seconds
    warm_seconds = 0.0 if options.cold else warm_up(options.entry)
    if options.log:
        return serve_each(options, warm_seconds)
    return serve(options.socket[0], options, warm_seconds)


if __name__ == "__main__":
    sys.exit(main())
