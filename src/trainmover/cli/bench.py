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
    bench_ablation,
    bench_collectives,
    bench_file,
    bench_memory,
    bench_overhead,
    bench_rebalance,
    bench_recovery,
    bench_restore,
    bench_scale,
    bench_snapshot,
    bench_straggler,
    ladder,
)
from trainmover.errors import ConfigError

MODULES: dict[str, Any] = {
    "recovery": bench_recovery,
    "collectives": bench_collectives,
    "overhead": bench_overhead,
    "memory": bench_memory,
    "ablation": bench_ablation,
    "scale": bench_scale,
    "rebalance": bench_rebalance,
    "straggler": bench_straggler,
    "snapshot": bench_snapshot,
    "restore": bench_restore,
}
PIPED_WIDTH = 120
"""Columns of tables that nobody's terminal bounds."""
AtOnceOption = Annotated[
    str, typer.Option(help="scale: how many machines go at the same time, such as 1,3")
]
CompileOption = Annotated[
    bool,
    typer.Option("--compile/--no-compile", help="recovery, ablation: under torch.compile, too"),
]
BENCHMARKS = {name: module.BENCHMARK for name, module in MODULES.items()}


def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(MODULES)}, or verify")],
    file: Annotated[Path | None, typer.Argument(help="with verify: the file to check")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write samples here")] = None,
    repetitions: Annotated[
        int, typer.Option(help="recovery, ablation, scale: repetitions", min=1)
    ] = 3,
    compile_too: CompileOption = True,
    ranks: Annotated[
        str, typer.Option(help="numbers of ranks: collectives (2,4,8), ablation (4,8)")
    ] = "",
    compile_ranks: Annotated[
        str, typer.Option(help="ablation: numbers of ranks under torch.compile")
    ] = "4",
    machines: Annotated[str, typer.Option(help="scale: numbers of machines")] = "2,4,8,16",
    at_once: AtOnceOption = "",
    switchovers: Annotated[int, typer.Option(help="rebalance: moves", min=2)] = 20,
    interval: Annotated[int, typer.Option(help="rebalance: steps between moves", min=5)] = 30,
    picture: Annotated[Path | None, typer.Option(help="ablation: draw a picture here")] = None,
    rounds: Annotated[int, typer.Option(help="collectives: rounds per case", min=7)] = 9,
    pairs: Annotated[int, typer.Option(help="overhead: pairs of blocks", min=10)] = 12,
    size_mib: Annotated[int, typer.Option(help="snapshot: MiB of state", min=16)] = 384,
    url: Annotated[str, typer.Option(help="restore: a shared or object store to measure")] = "",
) -> int:
    """Measure on this machine; absolute seconds are its own, ratios are what counts."""
    if name == "verify":
        return verify(file)
    if name not in MODULES:
        raise ConfigError(f"no benchmark '{name}'; there are {', '.join(MODULES)} and verify")
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    folder = Path(tempfile.mkdtemp(prefix="trainmover-bench-"))
    configs: dict[str, Callable[[], Any]] = {
        "recovery": lambda: bench_recovery.RecoveryConfig(
            folder=folder, repetitions=repetitions, has_compiled=compile_too
        ),
        "collectives": lambda: bench_collectives.CollectivesConfig(
            ranks=tuple(numbers(ranks or "2,4,8")), rounds=rounds
        ),
        "overhead": lambda: bench_overhead.OverheadConfig(folder=folder, pairs=pairs),
        "memory": lambda: bench_memory.MemoryConfig(folder=folder),
        "snapshot": lambda: bench_snapshot.SnapshotConfig(folder=folder, size_mib=size_mib),
        "restore": lambda: bench_restore.configured(folder, repetitions, url),
        "ablation": lambda: bench_ablation.AblationConfig(
            folder=folder,
            ranks=tuple(numbers(ranks or "4,8")),
            compile_ranks=tuple(numbers(compile_ranks)) if compile_too else (),
            repetitions=repetitions,
        ),
        "scale": lambda: bench_scale.ScaleConfig(
            folder=folder,
            machines=tuple(numbers(machines)),
            at_once=tuple(numbers(at_once)) if at_once else (),
            repetitions=repetitions,
        ),
        "rebalance": lambda: bench_rebalance.RebalanceConfig(
            folder=folder, switchovers=switchovers, interval=interval
        ),
        "straggler": lambda: bench_straggler.StragglerConfig(folder=folder),
    }
    try:
        content = measured(name, configs[name](), console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if json_file is not None:
        bench_file.write(json_file, content)
    show(console, content)
    if picture is not None and name == "ablation":
        ladder.draw(picture, content["samples"])
    return judge(name, content["samples"])


def measured(name: str, config: Any, console: Console) -> dict[str, Any]:
    """The file's content, after the benchmark has run and told how far it is."""
    started_s = time.time()

    def tell(text: str) -> None:
        console.print(f"{time.time() - started_s:7.1f} s  {text}")

    samples = MODULES[name].measure(config, tell)
    return bench_file.document(BENCHMARKS[name], samples, started_s)


def judge(name: str, samples: dict[str, Any]) -> int:
    """1 where what must hold in these samples does not, each a line."""
    wrong = BENCHMARKS[name].failures(samples)
    for line in wrong:
        typer.echo(f"FAILED: {line}")
    return 1 if wrong else 0


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
    benchmark = BENCHMARKS[content["bench"]]
    if rows := benchmark.table_rows(content["samples"]):
        console.print(rows_table(rows))
    console.print(table)
    for note in benchmark.notes(content["samples"]):
        console.print(note)
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


def rows_table(rows: list[list[str]]) -> Table:
    """Rows as a benchmark gives them, heads first."""
    table = Table()
    for index, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*row)
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
