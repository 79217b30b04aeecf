"""What `trainmover ckpt` prints for people: tables, sizes, progress on long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import prod
from typing import Any

import typer

from trainmover.checkpoint.difference import Difference
from trainmover.checkpoint.export import Exported
from trainmover.checkpoint.manifest import Manifest
from trainmover.checkpoint.reader import Checkpoint
from trainmover.checkpoint.restore_plan import RestorePlan
from trainmover.checkpoint.survey import Survey
from trainmover.cli.status import show_table

SHOWN = 20
"""Lines of a long list that are printed; --json has all of them."""


def size_text(byte_count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if byte_count < 1000:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1000
    return f"{byte_count:.2f} TB"


def losses_text(manifest: Manifest) -> str:
    """Recorded values of the last committed step."""
    return ", ".join(f"{name} {float.fromhex(value):.6g}" for name, value in manifest.loss)


def summary(name: str, manifest: Manifest) -> dict[str, Any]:
    """One line of `ls --json`."""
    return {
        "name": name,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "lineage": manifest.lineage,
        "generation": manifest.generation,
        "term": manifest.term,
        "world_size": manifest.world_size,
        "size_bytes": manifest.size_bytes,
        "file_count": len(manifest.files),
        "is_suspect": manifest.is_suspect,
        "loss": {name: float.fromhex(value) for name, value in manifest.loss},
        "created_at": manifest.created_at,
    }


def show_survey(found: Survey) -> None:
    """The table of `ls`."""
    if not found.committed and not found.rejected:
        typer.echo(f"no checkpoint at {found.location}")
    for run in dict.fromkeys(c.manifest.run_id for c in found.committed):
        mine = [c for c in found.committed if c.manifest.run_id == run]
        begun_from = mine[-1].manifest.begun_from
        how = "continues" if mine[-1].manifest.history else "was begun from"
        typer.echo(f"run {run}" + (f", {how} {begun_from}" if begun_from else ""))
        width = max(len(c.name) for c in mine)
        for c in mine:
            manifest = c.manifest
            mark = "  SUSPECT" if manifest.is_suspect else ""
            typer.echo(
                f"  {c.name:<{width}}  {manifest.world_size} ranks  "
                f"{size_text(manifest.size_bytes):>8}  {_time_text(manifest.created_at)}  "
                f"{losses_text(manifest)}{mark}"
            )
    for item in found.rejected:
        typer.echo(f"not a checkpoint: {item.name}: {item.reason}")


def show_checkpoint(checkpoint: Checkpoint) -> None:
    """What `show` prints."""
    manifest = checkpoint.manifest
    typer.echo(
        f"{checkpoint.name}: step {manifest.step} (lineage {manifest.lineage}), generation "
        f"{manifest.generation}, term {manifest.term}, run {manifest.run_id}"
    )
    typer.echo(f"  {manifest.consistency_point}; written {_time_text(manifest.created_at)} UTC")
    typer.echo(
        f"  {manifest.world_size} ranks, {len(manifest.files)} files, "
        f"{size_text(manifest.size_bytes)}; checksums {manifest.checksums}"
    )
    if manifest.loss:
        typer.echo(f"  {losses_text(manifest)}")
    if manifest.is_suspect:
        typer.echo("  SUSPECT: its loss was not finite, or stuck")
    show_table(
        [
            {"file": f.path, "size": size_text(f.size_bytes), "xxh3": f.xxh3}
            for f in manifest.files[:SHOWN]
        ],
        "files",
    )
    _say_rest(len(manifest.files), "files")
    show_table(
        [
            {
                "tensor": e.name,
                "kind": e.kind,
                "dtype": e.dtype,
                "shape": " x ".join(map(str, e.global_shape)) or "scalar",
                "cut": " x ".join(map(str, e.grid)) if prod(e.grid) > 1 else "",
            }
            for e in manifest.layout[:SHOWN]
        ],
        "tensors",
    )
    _say_rest(len(manifest.layout), "tensors")


def show_verification(results: Sequence[dict[str, Any]]) -> None:
    """What `verify` prints."""
    for result in results:
        typer.echo(f"{result['name']}: {'whole' if result['is_whole'] else 'DAMAGED'}")
        for damage in result["damages"]:
            typer.echo(f"  {damage['path']}: {damage['reason']}")


def show_export(name: str, place: str, done: Exported) -> None:
    """What `export` prints."""
    typer.echo(
        f"{name}: {done.tensor_count} tensors, {size_text(done.size_bytes)}, in "
        f"{len(done.files)} files at {place}"
    )
    for tensor in done.conflicts:
        typer.echo(f"  {tensor} differs between ranks; the lowest rank's was taken")


def show_pruning(result: dict[str, Any]) -> None:
    """What `prune` prints."""
    verb = "would delete" if result["is_dry_run"] else "deleted"
    for name in result["deleted"]:
        typer.echo(f"{verb} {name}")
    for name in result["leftovers"]:
        typer.echo(f"removed what was left of {name}")
    for problem in result["problems"]:
        typer.echo(f"still there: {problem}")
    typer.echo(f"kept: {', '.join(result['kept']) or 'nothing'}")


def show_difference(first: str, second: str, found: Difference) -> None:
    """What `diff` prints."""
    for name, one, two in found.facts:
        typer.echo(f"{name}: {one} -> {two}")
    for title, tensors in (
        (f"only in {first}", found.only_first),
        (f"only in {second}", found.only_second),
        ("another shape or dtype", found.reshaped),
        ("changed", found.changed),
    ):
        for tensor in tensors[:SHOWN]:
            typer.echo(f"{title}: {tensor}")
        _say_rest(len(tensors), title)
    if found.is_same_state:
        typer.echo(f"all {len(found.same)} tensors are identical, bit for bit")
    else:
        typer.echo(f"{len(found.changed)} tensors changed, {len(found.same)} identical")


def show_plan(checkpoint: Checkpoint, plan: RestorePlan, passed: Sequence[dict[str, Any]]) -> None:
    """What `restore-plan` prints."""
    for item in passed:
        typer.echo(f"not {item['name']}: {item['reason']}")
    how = {
        "same": "every rank as it was",
        "replicas": "the same shards",
        "cut": "tensors are cut anew",
        "layout": "the job brings its layout",
    }
    exact = "same numbers" if plan.is_exact else "equal state, other numbers"
    typer.echo(
        f"{checkpoint.name} (step {checkpoint.manifest.step}) on {plan.world_size} ranks: "
        f"{how[plan.how]}; {exact}"
    )
    for note in plan.notes:
        typer.echo(f"  {note}")
    rows = [
        {
            "rank": r.rank,
            "personal state": "fresh" if r.personal_of is None else f"of rank {r.personal_of}",
            "reads": size_text(r.read_bytes),
            "holds": size_text(r.state_bytes),
            "files": " ".join(r.files[:3]) + (" ..." if len(r.files) > 3 else ""),
        }
        for r in plan.ranks[:SHOWN]
    ]
    show_table(rows, "ranks")
    _say_rest(len(plan.ranks), "ranks")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs, where a person looks at it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=max(total, 1))
        yield lambda count: bar.advance(task, count)


def _say_rest(count: int, what: str) -> None:
    if count > SHOWN:
        typer.echo(f"... and {count - SHOWN} more {what}; --json has all")


def _time_text(created_at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(created_at, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"
