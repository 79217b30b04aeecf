"""`trainmover ckpt`: look at durable checkpoints, check, compare, export and prune them.

Works on a directory or URL alone: no job, no torch. Decides what each action prints; what a
checkpoint is, is the room `checkpoint`'s to say.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer

from trainmover.checkpoint.cadence_text import parse_retention
from trainmover.checkpoint.choice import Asked, Choice
from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.difference import compare
from trainmover.checkpoint.export import ExportOptions, export_safetensors
from trainmover.checkpoint.names import MANIFEST
from trainmover.checkpoint.reader import Checkpoint, open_checkpoint
from trainmover.checkpoint.restore_plan import plan_restore
from trainmover.checkpoint.retention import histories, to_delete
from trainmover.checkpoint.store import Store, open_store
from trainmover.checkpoint.survey import Survey, survey
from trainmover.checkpoint.tiers import pick
from trainmover.cli import checkpoint_text as text
from trainmover.cli import operator
from trainmover.errors import ConfigError, ManifestMissing, NothingToRestore
from trainmover.protocol import exits

FOUND_SOMETHING_WRONG = 1


def ckpt(
    action: Annotated[
        str, typer.Argument(help="ls, show, verify, export, prune, diff or restore-plan")
    ],
    place: Annotated[
        str, typer.Argument(help="directory or URL of checkpoints, or of one checkpoint")
    ],
    other: Annotated[
        str, typer.Argument(help="diff: the second checkpoint; export: where to")
    ] = "",
    to: Annotated[str, typer.Option("--to", help="export: the format")] = "safetensors",
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="export: parameter, buffer, optimizer or object"),
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option("--strip-prefix", help="export: drop this from the names of tensors")
    ] = "",
    keep: Annotated[
        str, typer.Option("--keep", help="prune: 'last 3', 'every 1000', 'last 3 or every 1000'")
    ] = "",
    run_id: Annotated[str, typer.Option("--run-id", help="of this run only")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="prune: only say what goes")] = False,
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="restore-plan: ranks to restore on")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="restore-plan: this step and no other")
    ] = None,
    allow_suspect: Annotated[
        bool, typer.Option("--allow-suspect", help="restore-plan: a poisoned one if need be")
    ] = False,
    as_json: operator.JsonOption = False,
) -> int:
    """Durable checkpoints: what is there, whether it is whole, who would read what."""
    if action not in ACTIONS:
        near = difflib.get_close_matches(action, ACTIONS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(ACTIONS)}"
        raise ConfigError(f"unknown action '{action}'{hint}")
    if to != "safetensors":
        raise ConfigError(f"--to: expected safetensors, got '{to}'")
    if other and action not in ("diff", "export"):
        raise ConfigError(f"{action} takes one place, got '{other}' as well")
    if not other and action in ("diff", "export"):
        raise ConfigError(f"{action} needs a second place")
    request = Request(
        place=place,
        other=other,
        kinds=frozenset(kind or ()),
        strip_prefix=strip_prefix,
        keep=keep,
        dry_run=dry_run,
        world_size=world_size,
        asked=Asked(step=step, run_id=run_id, allows_suspect=allow_suspect, is_required=True),
        as_json=as_json,
    )
    try:
        return ACTIONS[action](request)
    except (ManifestMissing, NothingToRestore) as error:
        raise ConfigError(str(error)) from error


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of one call."""

    place: str
    other: str
    kinds: frozenset[str]
    strip_prefix: str
    keep: str
    dry_run: bool
    world_size: int | None
    asked: Asked
    as_json: bool


def located(place: str) -> tuple[Store, str]:
    """Store and checkpoint name that `place` means; an empty name for a whole directory.

    Raises ConfigError if nothing is there.
    """
    store = open_store(place)
    if not store.exists():
        raise ConfigError(f"there is nothing at '{place}'")
    scheme, mark, rest = place.rpartition("://")
    path = rest.rstrip("/") if mark else os.path.abspath(place)
    parent, _, name = path.rpartition("/")
    if not name or (mark and not parent):
        return store, ""  # a root has no directory above
    above = open_store(f"{scheme}{mark}{parent}" if mark else (parent or "/"))
    return (above, name) if MANIFEST in above.list_files(name) else (store, "")


def opened(place: str, asked: Asked | None = None) -> Checkpoint:
    """The checkpoint at `place`, or the newest valid one below it."""
    store, name = located(place)
    if name:
        return open_checkpoint(store, name)
    chosen = chosen_from(store, asked or Asked(is_required=True))
    return open_checkpoint(store, chosen.name)


def chosen_from(store: Store, asked: Asked) -> Choice:
    """What a restart would take, by manifests and sizes. Raises NothingToRestore."""
    chosen = pick({store.location: store}, asked, checks_bytes=False)
    if chosen is None:
        raise NothingToRestore(f"there is no checkpoint at {store.location}")
    return chosen


def listed(request: Request) -> int:
    """Every checkpoint, newest last, and what only looks like one."""
    store, name = located(request.place)
    found = survey(store)
    if name:
        only = tuple(c for c in found.committed if c.name == name)
        found = Survey(location=found.location, committed=only, rejected=())
    if request.asked.run_id:
        mine = tuple(c for c in found.committed if c.manifest.run_id == request.asked.run_id)
        found = Survey(location=found.location, committed=mine, rejected=found.rejected)
    if request.as_json:
        rows = [text.summary(c.name, c.manifest) for c in found.committed]
        rejected = [asdict(item) for item in found.rejected]
        operator.print_json({"checkpoints": rows, "rejected": rejected})
    else:
        text.show_survey(found)
    return exits.COMPLETED


def shown(request: Request) -> int:
    """One checkpoint: its facts, files and tensors."""
    checkpoint = opened(request.place, request.asked)
    if request.as_json:
        operator.print_json({"name": checkpoint.name, **msgspec.to_builtins(checkpoint.manifest)})
    else:
        text.show_checkpoint(checkpoint)
    return exits.COMPLETED


def verified(request: Request) -> int:
    """Every byte against its checksum; exit code 1 if anything is wrong."""
    store, name = located(request.place)
    found = survey(store)
    wanted = [c.name for c in found.committed if name in ("", c.name)]
    rejected = [(item.name, item.reason) for item in found.rejected if name in ("", item.name)]
    if name and not wanted and not rejected:
        wanted = [name]  # a copy under a name of the person's own
    if not wanted and not rejected:
        raise NothingToRestore(f"there is no checkpoint at {store.location}")
    results: list[dict[str, Any]] = []
    for each in wanted:
        checkpoint = open_checkpoint(store, each)
        with text.progress(f"verifying {each}", checkpoint.manifest.size_bytes) as advance:
            damaged = checkpoint.verify(lambda file: advance(file.size_bytes))
        damages = [asdict(item) for item in damaged]
        results.append({"name": each, "is_whole": not damages, "damages": damages})
    results += [
        {
            "name": each,
            "is_whole": False,
            "damages": [{"path": MANIFEST, "reason": reason}],
        }
        for each, reason in rejected
    ]
    if request.as_json:
        operator.print_json(results)
    else:
        text.show_verification(results)
    is_whole = all(result["is_whole"] for result in results)
    return exits.COMPLETED if is_whole else FOUND_SOMETHING_WRONG


def exported(request: Request) -> int:
    """Whole tensors in stock safetensors files."""
    checkpoint = opened(request.place, request.asked)
    options = ExportOptions(strip_prefix=request.strip_prefix)
    if request.kinds:
        options = ExportOptions(strip_prefix=request.strip_prefix, kinds=request.kinds)
    count = sum(entry.kind in options.kinds for entry in checkpoint.manifest.layout)
    with text.progress(f"exporting {checkpoint.name}", count) as advance:
        done = export_safetensors(
            checkpoint,
            open_store(request.other),
            ExportOptions(
                strip_prefix=options.strip_prefix,
                kinds=options.kinds,
                progress=lambda _: advance(1),
            ),
        )
    if request.as_json:
        operator.print_json(asdict(done))
    else:
        text.show_export(checkpoint.name, request.other, done)
    return exits.COMPLETED


def pruned(request: Request) -> int:
    """Delete what the rule doesn't keep, and leftovers."""
    if not request.keep:
        raise ConfigError("prune: say what to keep, as in --keep 'last 3'")
    policy = parse_retention(request.keep)
    store, name = located(request.place)
    if name:
        raise ConfigError(f"prune works on the directory of all checkpoints, '{name}' is one")
    committed = survey(store).committed
    wanted = histories(committed)
    if request.asked.run_id:
        runs = sorted({c.manifest.run_id for c in committed})
        wanted = [(run,) for run in runs if run == request.asked.run_id]
        if not wanted:
            complaint = f"no run '{request.asked.run_id}' at {store.location}; there are {runs}"
            raise ConfigError(complaint)
    deleted: list[str] = []
    leftovers: list[str] = []
    problems: list[str] = []
    for run, *history in wanted:
        if request.dry_run:
            deleted += to_delete(committed, policy, run_id=run, history=history)
            continue
        done = prune(store, policy, run_id=run, history=history)
        deleted += done.deleted
        leftovers += done.leftovers
        problems += done.problems
    result = {
        "is_dry_run": request.dry_run,
        "deleted": deleted,
        "leftovers": leftovers,
        "problems": problems,
        "kept": [c.name for c in survey(store).committed if c.name not in deleted],
    }
    if request.as_json:
        operator.print_json(result)
    else:
        text.show_pruning(result)
    return FOUND_SOMETHING_WRONG if problems else exits.COMPLETED


def compared(request: Request) -> int:
    """Two checkpoints, tensor by tensor; exit code 1 if their state differs."""
    first, second = opened(request.place), opened(request.other)
    with text.progress("comparing", len(first.manifest.layout)) as advance:
        found = compare(first, second, lambda _: advance(1))
    if request.as_json:
        operator.print_json({"is_same_state": found.is_same_state, **asdict(found)})
    else:
        text.show_difference(first.name, second.name, found)
    return exits.COMPLETED if found.is_same_state else FOUND_SOMETHING_WRONG


def planned(request: Request) -> int:
    """Which checkpoint a restart takes, and who reads what."""
    store, name = located(request.place)
    passed: list[dict[str, Any]] = []
    if not name:
        chosen = chosen_from(store, request.asked)
        name = chosen.name
        passed = [asdict(item) for item in chosen.passed_over]
    checkpoint = open_checkpoint(store, name)
    plan = plan_restore(checkpoint, request.world_size)
    if request.as_json:
        operator.print_json({"name": name, "passed_over": passed, **asdict(plan)})
    else:
        text.show_plan(checkpoint, plan, passed)
    return exits.COMPLETED


ACTIONS: dict[str, Callable[[Request], int]] = {
    "ls": listed,
    "show": shown,
    "verify": verified,
    "export": exported,
    "prune": pruned,
    "diff": compared,
    "restore-plan": planned,
}
