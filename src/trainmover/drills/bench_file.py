"""The file that every benchmark writes: raw samples, where they come from, and their summary.

Decides the format, and that a summary is a function of the samples alone: `verify` computes it
again. Absolute seconds differ between machines; ratios within one file are what is compared.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from trainmover.edges.probes import version_of
from trainmover.errors import ConfigError

FORMAT: Final = 1
PACKAGES: Final = ("trainmover", "torch", "numpy", "msgspec", "aiohttp")

Samples = dict[str, Any]
Summary = dict[str, float | bool | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One benchmark: how its summary comes from its samples, and what is aimed at."""

    name: str
    summarise: Callable[[Samples], Summary]
    targets: Mapping[str, str]
    """Name in the summary -> target in words."""
    failures: Callable[[Samples], list[str]] = lambda samples: []
    """What must hold in these samples and does not, a sentence each: the command exits with 1."""
    notes: Callable[[Samples], list[str]] = lambda samples: []
    """What a reader of the figures must know, a sentence each."""
    table_rows: Callable[[Samples], list[list[str]]] = lambda samples: []
    """A table beside the summary; its first row has the heads."""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg(),
    }


def cpu_model() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}


def document(benchmark: Benchmark, samples: Samples, started_s: float) -> dict[str, Any]:
    """All that goes into the file."""
    return {
        "format": FORMAT,
        "bench": benchmark.name,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s)),
        "seconds": time.time() - started_s,
        "command": ["trainmover", *sys.argv[1:]],
        "machine": machine(),
        "versions": versions(),
        "targets": dict(benchmark.targets),
        "samples": samples,
        "summary": benchmark.summarise(samples),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """Content of a benchmark's file. Raises ConfigError."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no benchmark file: {error}") from error
    if content.get("format") != FORMAT or "samples" not in content:
        raise ConfigError(f"{path} is no benchmark file of format {FORMAT}")
    return content


def verify(content: Mapping[str, Any], benchmarks: Mapping[str, Benchmark]) -> list[str]:
    """What in the summary does not follow from the samples; empty if all does."""
    benchmark = benchmarks.get(content["bench"])
    if benchmark is None:
        return [f"unknown benchmark '{content['bench']}'"]
    again = json.loads(json.dumps(benchmark.summarise(content["samples"])))
    told = content["summary"]
    return [
        f"{name}: the file says {told.get(name)}, its samples give {again.get(name)}"
        for name in sorted({*told, *again})
        if told.get(name) != again.get(name)
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Value below which `share` of `values` lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
