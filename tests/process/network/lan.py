"""Machines with an address and a cable of their own: network namespaces on one bridge.

Decides the topology: a switch (a namespace of its own, so that nothing leaves it) that also holds
the controller, and one namespace per machine. Needs root; where it can't be made a test is skipped
with the words *not shown*, because nothing was shown.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

NOT_SHOWN = "not shown: needs root"
NAMESPACES = Path("/run/netns")
NEW_NET = 0x40000000

T = TypeVar("T")


def run(*words: str) -> None:
    """One command; raises with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Lan:
    """A switch with one cable per machine; `second` adds another one beside it."""

    def __init__(self, machines: int, *, second: bool = False) -> None:
        if os.geteuid() != 0:
            pytest.skip(NOT_SHOWN)
        self.prefix = f"tm{os.getpid()}"
        self.machines = machines
        self.has_second = second
        self.processes: list[subprocess.Popen[bytes]] = []
        self._inside: ThreadPoolExecutor | None = None

    def __enter__(self) -> Lan:
        try:
            self._make()
        except OSError as error:
            self.close()
            if "ermitted" in str(error) or "enied" in str(error):
                pytest.skip(f"{NOT_SHOWN} ({error})")
            raise
        self._inside = ThreadPoolExecutor(1, initializer=self._enter_switch)
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
        left = [name for name in self.names() if (NAMESPACES / name).exists()]
        assert not left, f"namespaces left behind: {left}"

    def names(self) -> list[str]:
        return [self.switch, *(self.name(index) for index in range(self.machines))]

    @property
    def switch(self) -> str:
        return f"{self.prefix}sw"

    def name(self, index: int) -> str:
        return f"{self.prefix}m{index}"

    @staticmethod
    def address(index: int) -> str:
        return f"10.88.0.{index + 1}"

    @staticmethod
    def second_address(index: int) -> str:
        return f"10.99.0.{index + 1}"

    controller = "10.88.0.254"

    def _make(self) -> None:
        for name in self.names():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            self._without_ipv6(name)
        self._bridge("br0")
        run("ip", "-n", self.switch, "addr", "add", f"{self.controller}/24", "dev", "br0")
        for index in range(self.machines):
            self._cable(index, "br0", "eth0", f"p{index}", self.address(index))
        if self.has_second:
            self._bridge("br1")
            for index in range(self.machines):
                self._cable(index, "br1", "eth1", f"q{index}", self.second_address(index))

    @staticmethod
    def _without_ipv6(name: str) -> None:
        """C85: machines that have IPv4 only."""
        switch = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
        if Path(switch).exists():
            run("nsenter", f"--net={NAMESPACES / name}", "sh", "-c", f"echo 1 > {switch}")

    def _bridge(self, bridge: str) -> None:
        run("ip", "-n", self.switch, "link", "add", bridge, "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", bridge, "up")

    def _cable(self, index: int, bridge: str, inside: str, port: str, address: str) -> None:
        name, switch = self.name(index), self.switch
        run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", inside, "netns", name)
        run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", inside)
        run("ip", "-n", name, "link", "set", inside, "up")

    def cut(self, index: int) -> None:
        """Pull a machine's cable at the switch: nobody is told, packets vanish."""
        run("ip", "-n", self.switch, "link", "set", f"p{index}", "down")

    def plug(self, index: int) -> None:
        """Plug it in again."""
        run("ip", "-n", self.switch, "link", "set", f"p{index}", "up")

    def isolate(self, index: int) -> None:
        """On the first switch this machine reaches the controller only."""
        run(*f"ip -n {self.switch} link set p{index} type bridge_slave isolated on".split())

    def start(self, name: str, words: list[str], output: Path, **environment: str) -> Any:
        """A process inside a namespace."""
        with output.open("ab") as stream:
            process = subprocess.Popen(
                ["nsenter", f"--net={NAMESPACES / name}", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def _enter_switch(self) -> None:
        """This thread, and only this one, sees the switch's network."""
        library = ctypes.CDLL(None, use_errno=True)
        with (NAMESPACES / self.switch).open() as handle:
            if library.setns(handle.fileno(), NEW_NET):
                raise OSError(ctypes.get_errno(), "setns")

    def inside(self, fn: Callable[[], T]) -> T:
        """`fn()` in the switch's network."""
        assert self._inside is not None
        return self._inside.submit(fn).result(30)

    def close(self) -> None:
        """End what still runs, then remove every namespace."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 10.0
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._inside is not None:
            self._inside.shutdown()
        for name in self.names():
            if (NAMESPACES / name).exists():
                run("ip", "netns", "del", name)
