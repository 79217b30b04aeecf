"""Something that one thread fetches over blocking streams, and that another one may call off.

A joiner's main thread reads the state that a plan names; the plan may be aborted meanwhile, because
another member was lost, and then what is fetched is of no use: the next plan must not wait for it.
Closing a descriptor under a thread that waits for it is a race; its stream is shut down instead,
which the reader sees as its end.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
import weakref
from typing import Any, Final

from trainmover.errors import ConnectTimeout, TransportError

LOOK_S: Final = 0.1
"""Longest time from the end of an errand to the end of an attempt to connect for it."""


class Errand:
    """Streams opened for one purpose; none outlives `end`.

    Args:
        name: What it is for, as errors say it.
        limit_s: Longest wait of a stream without progress, connecting included.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_over = False

    def end(self) -> None:
        """From any thread: whoever reads one of the streams sees its end. Does not block."""
        with self._lock:
            self._is_over = True
            for stream in self._streams:
                _shut(stream)

    @property
    def is_over(self) -> bool:
        """Whether nobody wants it any more."""
        return self._is_over

    def check(self) -> None:
        """Raises TransportError where nobody wants it any more."""
        if self._is_over:
            raise TransportError(f"{self.name} was called off")

    def connect(self, host: str, port: int) -> socket.socket:
        """A stream to that address, with `limit_s` as its timeout.

        Called on: any thread that may block, for up to `limit_s`.

        Raises:
            ConnectTimeout: Nobody answered in time.
            ConnectionRefusedError: Nobody listens there.
            OSError: It can't be reached.
            TransportError: The errand is over.
        """
        deadline = time.monotonic() + self.limit_s
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for at, (family, kind, protocol, _, address) in enumerate(found, 1):
            stream = socket.socket(family, kind, protocol)
            try:
                self._connect(stream, address, deadline)
                self._adopt(stream)
            except OSError:
                stream.close()
                if at == len(found):
                    raise
                continue
            except BaseException:
                stream.close()
                raise
            return stream
        raise OSError(errno.EADDRNOTAVAIL, f"{host} has no address")

    def _connect(self, stream: socket.socket, address: Any, deadline: float) -> None:
        stream.setblocking(False)
        code = stream.connect_ex(address)
        poll = select.poll()
        poll.register(stream, select.POLLOUT)
        while code in (errno.EINPROGRESS, errno.EALREADY):
            self.check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ConnectTimeout(f"nobody answered at {address} within {self.limit_s} s")
            if poll.poll(min(LOOK_S, left_s) * 1000):
                code = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _adopt(self, stream: socket.socket) -> None:
        with self._lock:
            self.check()
            self._streams.add(stream)
        stream.settimeout(self.limit_s)


def _shut(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EBADF):
            raise
