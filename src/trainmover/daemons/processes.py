"""Whose processes are whose: everything of one machine, and nothing else (C118).

A machine's nursery leads a session; workers and all their children are in it. Sessions are found in
the process table, never by name or parentage.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from trainmover.daemons.run_directory import MachineFile, RunDirectory, is_alive, read_struct
from trainmover.edges import probes

PENDING = ("SigPnd:", "ShdPnd:")


def session_members(session: int, leader_start: int) -> tuple[int, ...]:
    """Pids in the session, ascending; none if a stranger leads a session of that number now."""
    if session <= 0:
        return ()
    if leader_start and probes.start_time(session) not in (0, leader_start):
        return ()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _session_of(int(entry.name)) == session:
            found.append(int(entry.name))
    return tuple(sorted(found))


def kill_session(session: int, leader_start: int) -> int:
    """SIGKILL to every member; how many there were."""
    members = session_members(session, leader_start)
    for pid in members:
        send(pid, signal.SIGKILL)
    return len(members)


def children_of(parent: int) -> tuple[int, ...]:
    """Pids of the direct children of a process of ours that still lives."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and probes.parent_of(int(entry.name)) == parent:
            found.append(int(entry.name))
    return tuple(sorted(found))


def machine_of(directory: RunDirectory, machine: str) -> MachineFile | None:
    """Recorded processes of a machine; None for one that has never run or has ended."""
    return read_struct(directory.machine_file(machine), MachineFile)


def machine_pids(directory: RunDirectory, machine: str) -> tuple[int, ...]:
    """Agent, nursery, workers and their children that live at present."""
    found = machine_of(directory, machine)
    if found is None:
        return ()
    agent = (found.agent_pid,) if is_alive(found.agent_pid, 0) else ()
    return (*agent, *session_members(found.nursery_pid, found.nursery_start))


def kill_machines(directory: RunDirectory, *machines: str) -> list[tuple[int, ...]]:
    """SIGKILL to the machines' whole process trees, as if at one instant; the pids of each.

    For drills. All are found before the first one is hurt.
    """
    found = [machine_pids(directory, machine) for machine in machines]
    for pids in found:
        for pid in pids[:1]:
            send(pid, signal.SIGSTOP)  # it must not mend what is being broken
    for pids in found:
        for pid in reversed(pids):
            send(pid, signal.SIGKILL)
    return found


def kill_machine(directory: RunDirectory, machine: str) -> tuple[int, ...]:
    """`kill_machines` of one."""
    (pids,) = kill_machines(directory, machine)
    return pids


def is_here_to_stay(pid: int, start: int) -> bool:
    """Whether the process life lasts and no SIGKILL is on its way to it."""
    if not is_alive(pid, start):
        return False
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    pending = [line.split()[1] for line in text.splitlines() if line.startswith(PENDING)]
    return not any(int(mask, 16) & (1 << (signal.SIGKILL - 1)) for mask in pending)


def send(pid: int, number: int) -> None:
    """Signal a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _session_of(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, _, _, session = stat[stat.rfind(")") + 2 :].split()[:4]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else int(session)
