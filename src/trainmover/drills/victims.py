"""How a drill hurts a running job: which processes play a machine, and what is done to them.

Decides nothing about when. Only processes that the job itself has recorded (and what they forked)
are touched; a process that is gone already is as good as killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path
from typing import Final

import psutil

from trainmover.daemons import processes
from trainmover.daemons.run_directory import ControllerFile, MachineFile, RunDirectory, read_struct
from trainmover.errors import DrillFailed

PIDFD_GETFD: Final = 438
"""System call number, the same on every architecture that numbers calls alike since 2019."""


def machine_file(directory: RunDirectory, machine: str) -> MachineFile:
    """What the agent of `machine` has recorded. Raises DrillFailed."""
    found = read_struct(directory.machine_file(machine), MachineFile)
    if found is None:
        known = ", ".join(sorted(p.stem for p in (directory.path / "machines").glob("*.json")))
        raise DrillFailed(f"machine {machine} has recorded no processes; recorded: {known or '-'}")
    return found


def worker_pid(directory: RunDirectory, machine: str, incarnation: str) -> int:
    """Pid of one worker. Raises DrillFailed."""
    for name, pid in machine_file(directory, machine).workers:
        if name == incarnation:
            return pid
    raise DrillFailed(f"{machine} has no worker {incarnation}")


def send(pid: int, number: signal.Signals) -> None:
    """A signal to one process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def kill_worker_process(pid: int) -> None:
    """SIGKILL the worker alone: its loader workers live on for a while."""
    send(pid, signal.SIGKILL)


def kill_worker_group(pid: int) -> None:
    """SIGKILL the worker with all it has forked."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_machines(directory: RunDirectory, *machines: str) -> None:
    """SIGKILL agents, nurseries, workers and what they forked, in one go. Raises DrillFailed."""
    killed = processes.kill_machines(directory, *machines)
    for machine, pids in zip(machines, killed, strict=True):
        if not pids:
            raise DrillFailed(f"machine {machine} has no live process to kill")


def kill_agent(directory: RunDirectory, machine: str) -> int:
    """SIGKILL the agent alone; its pid."""
    pid = machine_file(directory, machine).agent_pid
    send(pid, signal.SIGKILL)
    return pid


def kill_controller(directory: RunDirectory) -> int:
    """SIGKILL the controller; its pid. Raises DrillFailed."""
    found = read_struct(directory.path / "controller.json", ControllerFile)
    if found is None:
        raise DrillFailed(f"no controller is recorded in {directory.path}")
    send(found.pid, signal.SIGKILL)
    return found.pid


def connections_between(first: int, second: int) -> list[tuple[int, int, str]]:
    """TCP connections of two processes: (descriptor in `first`, local port, state)."""
    theirs = {
        (c.laddr.ip, c.laddr.port)
        for c in psutil.Process(second).net_connections(kind="tcp")
        if c.laddr and c.raddr
    }
    found = []
    for connection in psutil.Process(first).net_connections(kind="tcp"):
        if connection.raddr and (connection.raddr.ip, connection.raddr.port) in theirs:
            found.append((connection.fd, connection.laddr.port, connection.status))
    return found


def reset_connections(first: int, second: int) -> int:
    """Reset every TCP connection between two processes; how many there were.

    Both ends see ECONNRESET, as after a switch that dropped its table. Needs the right to trace
    `first` (a descendant, or root). Raises DrillFailed where the system refuses.
    """
    count = 0
    for descriptor, port, status in connections_between(first, second):
        if status != psutil.CONN_ESTABLISHED:
            continue
        with _borrowed(first, descriptor) as borrowed:
            if not _is_still(borrowed, port):
                continue  # closed since we looked: its number is another one's by now
            try:
                _disconnect(borrowed)
            except OSError as error:
                raise DrillFailed(f"connection of port {port} can't be reset: {error}") from error
        count += 1
    return count


def _borrowed(pid: int, descriptor: int) -> socket.socket:
    """The same socket that `pid` has open as `descriptor`."""
    library = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        own = library.syscall(PIDFD_GETFD, handle, descriptor, 0)
    finally:
        os.close(handle)
    if own < 0:
        number = ctypes.get_errno()
        raise DrillFailed(f"process {pid} does not lend its socket: {os.strerror(number)}")
    return socket.socket(fileno=own)


def _is_still(borrowed: socket.socket, port: int) -> bool:
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        borrowed.getpeername()
    except OSError:
        return False
    return bool(borrowed.getsockname()[1] == port)


def _disconnect(borrowed: socket.socket) -> None:
    """connect() to no address family at all: the kernel answers the peer with a reset."""
    library = ctypes.CDLL(None, use_errno=True)
    nowhere = ctypes.create_string_buffer(16)  # struct sockaddr with AF_UNSPEC (0)
    if library.connect(borrowed.fileno(), nowhere, 16) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def marked(name: str, value: str) -> list[psutil.Process]:
    """Live processes whose environment has `name`=`value`: orphans, too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(name) == value:
                found.append(process)
        except psutil.Error:
            continue  # ended while we looked, or another user's
    return found


def end_all(found: list[psutil.Process]) -> None:
    """SIGKILL each and wait until it is gone."""
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=5)


def last_lines(path: Path, count: int) -> str:
    """End of a text file for an error message."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""
