"""`trainmover bench NAME`: figures of this machine, as a table and as a file to be checked."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trainmover.drills import (
    bench_collectives,
    bench_file,
    bench_memory,
    bench_overhead,
    bench_recovery,
)
from trainmover.errors import ConfigError

MODULES: dict[str, Any] = {
    "recovery": bench_recovery,
    "collectives": bench_collectives,
    "overhead": bench_overhead,
    "memory": bench_memory,
}
BENCHMARKS = {name: module.BENCHMARK for name, module in MODULES.items()}


def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(MODULES)}, or verify")],
    file: Annotated[Path | None, typer.Argument(help="with verify: the file to check")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write samples here")] = None,
    repetitions: Annotated[int, typer.Option(help="recovery: repetitions", min=1)] = 3,
    compile_too: Annotated[
        bool, typer.Option("--compile/--no-compile", help="recovery: under torch.compile, too")
    ] = True,
    ranks: Annotated[str, typer.Option(help="collectives: numbers of ranks")] = "2,4,8",
    rounds: Annotated[int, typer.Option(help="collectives: rounds per case", min=7)] = 9,
    pairs: Annotated[int, typer.Option(help="overhead: pairs of blocks", min=10)] = 12,
) -> int:
    """Measure on this machine; absolute seconds are its own, ratios are what counts."""
    if name == "verify":
        return verify(file)
    if name not in MODULES:
        raise ConfigError(f"no benchmark '{name}'; there are {', '.join(MODULES)} and verify")
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="trainmover-bench-"))
    configs: dict[str, Callable[[], Any]] = {
        "recovery": lambda: bench_recovery.RecoveryConfig(
            folder=folder, repetitions=repetitions, has_compiled=compile_too
        ),
        "collectives": lambda: bench_collectives.CollectivesConfig(
            ranks=tuple(numbers(ranks)), rounds=rounds
        ),
        "overhead": lambda: bench_overhead.OverheadConfig(folder=folder, pairs=pairs),
        "memory": lambda: bench_memory.MemoryConfig(folder=folder),
    }
    started_s = time.time()

    def tell(text: str) -> None:
        console.print(f"{time.time() - started_s:7.1f} s  {text}")

    try:
        samples = MODULES[name].measure(configs[name](), tell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    content = bench_file.document(BENCHMARKS[name], samples, started_s)
    if json_file is not None:
        bench_file.write(json_file, content)
    show(console, content)
    return 0


def verify(file: Path | None) -> int:
    """Compute the summary again from the samples; 1 where it differs."""
    if file is None:
        raise ConfigError("name the file: trainmover bench verify FILE")
    content = bench_file.read(file)
    wrong = bench_file.verify(content, BENCHMARKS)
    for line in wrong:
        typer.echo(line)
    if not wrong:
        typer.echo(f"{file}: the summary of bench {content['bench']} follows from its samples")
    return 1 if wrong else 0


def show(console: Console, content: dict[str, Any]) -> None:
    """The summary as a table, and for collectives every case."""
    machine = content["machine"]
    title = f"bench {content['bench']}: {machine['cores']} cores, {machine['cpu']}"
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("target")
    for name, value in content["summary"].items():
        table.add_row(name, cell(value), content["targets"].get(name, ""))
    if content["bench"] == "collectives":
        console.print(cases_table(content["samples"]["cases"]))
    console.print(table)
    load = machine["load_average"][0]
    if load > machine["cores"]:
        console.print(f"load average {load:.1f}: other work ran beside this; trust ratios only")


def cases_table(cases: list[dict[str, Any]]) -> Table:
    """Ratio to Gloo by collective, size, ranks and place."""
    table = Table(title="ours / Gloo, lower quartiles")
    for column in ("collective", "bytes", "ranks", "place", "ours ms", "gloo ms", "ratio"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for case in cases:
        table.add_row(
            case["collective"],
            str(case["bytes"]),
            str(case["ranks"]),
            "local" if case["is_local"] else "sockets",
            f"{1000 * bench_file.quantile(case['ours_s'], 0.25):.3f}",
            f"{1000 * bench_file.quantile(case['gloo_s'], 0.25):.3f}",
            f"{bench_collectives.ratio(case):.2f}",
        )
    return table


def cell(value: Any) -> str:
    """One figure for people."""
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def numbers(text: str) -> list[int]:
    """Whole numbers of a list with commas. Raises ConfigError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"expected numbers with commas between, got '{text}'") from error
