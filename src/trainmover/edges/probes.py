"""What this machine is and how its processes are: read from the system, judged elsewhere.

Nothing here imports torch: versions come from package metadata, so that a machine is compared
before anything slow starts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import Final

import psutil

from trainmover.errors import ConfigError
from trainmover.protocol.addresses import is_ipv6
from trainmover.protocol.messages import Facts

PACKAGES_THAT_CHANGE_NUMBERS: Final = ("torch", "numpy")
PACKAGES_TO_MENTION: Final = ("trainmover", "msgspec", "torchdata")
FLAGS_THAT_CHANGE_NUMBERS: Final = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "sve2",
    "bf16",
)
"""CPU features by which math libraries choose kernels, and with them the order of sums."""
MIN_OPEN_FILES: Final = 1024
MIN_SHARED_MEMORY_BYTES: Final = 64 * 1024 * 1024


def version_of(package: str) -> str:
    """Installed version from the package's metadata; ``absent`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def cpu_flags(text: str | None = None) -> tuple[str, ...]:
    """Those of `FLAGS_THAT_CHANGE_NUMBERS` that the CPU has, as the kernel says."""
    if text is None:
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(value.split())
            return tuple(flag for flag in FLAGS_THAT_CHANGE_NUMBERS if flag in present)
    return ()


def cpu_model() -> str:
    """Model of the first CPU; empty where the kernel does not say."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return ""
    return ""


def script_digest(path: str) -> str:
    """Digest of the training script, so that two machines don't run two versions of it."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return "absent"


def machine_facts(script: str = "", threads: int | None = None) -> Facts:
    """Facts of this machine: those that must equal on all machines, and those that should.

    `threads` is a worker's number of intra-op threads; an agent, which has none, leaves it out.
    """
    must = [(name, version_of(name)) for name in PACKAGES_THAT_CHANGE_NUMBERS]
    must += [
        ("python", platform.python_version()),
        ("architecture", platform.machine()),
        ("byte order", sys.byteorder),
        ("CPU features", " ".join(cpu_flags())),
    ]
    if threads is not None:
        must.append(("threads", str(threads)))
    if script:
        must.append((f"script {Path(script).name}", script_digest(script)))
    for variable in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"):
        must.append((variable, os.environ.get(variable, "unset")))
    should = [(name, version_of(name)) for name in PACKAGES_TO_MENTION]
    should += [("CPU", cpu_model()), ("kernel", platform.release())]
    return Facts(must_equal=tuple(must), should_equal=tuple(should))


def preflight(run_directory: Path) -> tuple[str, ...]:
    """What would break later, each with its remedy; empty when nothing would (C13)."""
    problems = []
    probe = run_directory / f".probe-{os.getpid()}"
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        problems.append(f"the run directory {run_directory} can't be written: {error.strerror}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        problems.append(
            f"only {soft} open files are allowed (at most {hard}); "
            f"expected {MIN_OPEN_FILES}: raise it with `ulimit -n`"
        )
    try:
        free = shutil.disk_usage("/dev/shm").free
        if free < MIN_SHARED_MEMORY_BYTES:
            problems.append(
                f"/dev/shm has {free // 2**20} MiB free, expected "
                f"{MIN_SHARED_MEMORY_BYTES // 2**20}: DataLoader workers pass batches through it"
            )
    except OSError as error:
        problems.append(f"/dev/shm can't be used: {error.strerror}; DataLoader workers need it")
    return tuple(problems)


def address_that_reaches(host: str, port: int) -> str:
    """This machine's address on the way to `host`; no packet is sent. Raises ConfigError."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no route to the controller at {host}: {error}; name this machine's address "
            "with --host"
        ) from error


def own_address(host: str) -> str:
    """`host` if this machine can listen on it. Raises ConfigError that names those it has."""
    try:
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        with socket.create_server((host, 0), family=family):
            return host
    except OSError as error:
        has = ", ".join(
            f"{address.address} ({name})"
            for name, addresses in sorted(psutil.net_if_addrs().items())
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        )
        raise ConfigError(
            f"workers can't listen on {host}: {error.strerror or error}; name an address of this "
            f"machine that the others reach with --host; it has {has}"
        ) from error


def process_state(pid: int) -> str:
    """One letter of the kernel (R, S, D, T, Z ...); empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The command's name, in parentheses, may hold anything.
    return stat[stat.rfind(")") + 2 : stat.rfind(")") + 3]


def parent_of(pid: int) -> int:
    """Pid of the parent; 0 when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat[stat.rfind(")") + 2 :].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def start_time(pid: int) -> int:
    """Kernel's start time of a process in clock ticks: with the pid it names one process life."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat[stat.rfind(")") + 2 :].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def default_threads(processes_on_host: int) -> int:
    """Intra-op threads per worker when `processes_on_host` workers share this host."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, processes_on_host))
