"""Sentences for what goes wrong in the first five minutes with a new script.

Decides only how a mistake is told: what was expected, what was seen, where, and the remedy. When
something is a mistake is decided where it is noticed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainmover.errors import ScriptError, TrackError
from trainmover.worker.scan import find_untracked
from trainmover.worker.sequence import script_place

if TYPE_CHECKING:
    from trainmover.worker.step import Step
    from trainmover.worker.stepper import Stepper

NO_GROUP = "Default process group has not been initialized"
"""What torch says to `get_rank()` and collectives without a group."""

LOADER_ENDED = r"DataLoader worker \(pid.*\) exited unexpectedly"

USED_BEFORE_RUN = (
    "torch.distributed was used before trainmover.run(main). Move the call into main(job): the "
    "job's group is there when main is entered"
)

IN_CHILD = (
    "trainmover.run() was reached in a loader worker (or another child process): put it under "
    '`if __name__ == "__main__":`'
)

NO_LOOP = (
    "main returned without entering job.steps(); write `for step in job.steps(N):` around the "
    "training loop"
)


LOOP_LEFT_BY_EXCEPTION = (
    "main returned although an exception that it caught had ended its job.steps() loop; the other "
    "ranks still wait. Let the exception pass, or leave the loop with `break` on all ranks"
)


def never_entered(index: int) -> ScriptError:
    """The loop body of a step had no `with step`."""
    return ScriptError(
        f"steps() gave step {index + 1} but step {index} was never entered ({script_place()}); "
        "write `with step:` around the update (or step.run(fn)) in the loop body"
    )


def no_gate(index: int, stepper: Stepper) -> ScriptError:
    """A step ended and nothing that was tracked has stepped."""
    inventory = stepper.inventory
    names = [*inventory.tracked, *(["loader"] if stepper.batches else [])]
    known = [*inventory.tracked.values(), *stepper.batches]
    found = [item for item in find_untracked(known, inventory.ignored) if item.kind == "optimizer"]
    hint = f" {found[0].message}" if found else ""
    return ScriptError(
        f"step {index} ended without a gate: no tracked optimizer stepped and step.gate() was not "
        f"called. Tracked: {', '.join(names) or 'nothing'}.{hint}"
    )


def late_track(step: Step | None) -> TrackError | None:
    """`track()` once the loop runs; None where it is in time."""
    if step is None:
        return None
    remedy = "call it once, after building and before job.steps()"
    is_inside = step.was_entered and not step.committed and not step.was_undone
    where = f"inside step {step.index}" if is_inside else "after the first step"
    return TrackError(f"track() was called {where} ({script_place()}); {remedy}")


def no_batch() -> str:
    """Step 0 read nothing through a loader that is tracked."""
    return (
        "step 0 took no batch from job.batches; loader is tracked. An interrupted step would read "
        "on: write `batches = job.batches(loader)` and take each batch inside the step with "
        "next(batches)"
    )


def wrong_main(main: Any) -> ScriptError | None:
    """`main` can't be called as main(job), or calling it would run nothing."""
    name = getattr(main, "__name__", repr(main))
    wanted = f"trainmover.run(main) needs a function of one argument: def {name}(job: "
    wanted += "trainmover.Job) -> None"
    if not callable(main):
        return ScriptError(wanted.replace(name, "main") + f"; got a {type(main).__name__}")
    if inspect.iscoroutinefunction(main) or inspect.isgeneratorfunction(main):
        kind = "coroutine" if inspect.iscoroutinefunction(main) else "generator"
        return ScriptError(f"{wanted}; {name} is a {kind} function, calling it runs nothing")
    try:
        signature = inspect.signature(main)
    except (TypeError, ValueError):
        return None  # a builtin without a signature: calling it will tell
    try:
        signature.bind(object())
    except TypeError:
        return ScriptError(f"{wanted}; got {name}{signature}")
    return None


def left_alone(rank: int, step: int) -> str:
    """One rank has left the loop and the others have not."""
    return with_remedy(f"rank {rank} left the loop at step {step}, others wait in gate {step}")


def with_remedy(detail: str) -> str:
    """What ranks that meet at different gates have to change."""
    return (
        f"{detail}: every rank must run the same number of steps and track the same objects. Agree "
        "on the end (all-reduce the decision) and leave the loop at the same step on all ranks"
    )


def other_names(own_rank: int, names: Sequence[str], by_rank: Sequence[Sequence[str]]) -> str:
    """`track()` was given different names: the first difference, from each side."""
    for rank, theirs in enumerate(by_rank):
        if tuple(theirs) == tuple(names):
            continue
        mine, other = _first_difference(names, theirs)
        return (
            f"track() was given other names on another rank: rank {own_rank} tracks "
            f"{mine or 'nothing more'}, rank {rank} {other or 'nothing more'}; every rank must "
            "track the same objects"
        )
    return "track() was given other names on another rank; every rank must track the same objects"


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for index in range(max(len(mine), len(theirs))):
        own = mine[index] if index < len(mine) else ""
        other = theirs[index] if index < len(theirs) else ""
        if own != other:
            return own, other
    return "", ""


def check_names(stepper: Stepper) -> None:
    """Compare names of tracked objects over all ranks before the first step.

    Called on: every rank, at the end of building. Collective: one all-reduce of two numbers; the
    names themselves travel only if they differ.
    """
    if not stepper.host.is_managed or stepper.world_size == 1:
        return
    digest = stepper.inventory.names_digest
    pair = torch.tensor([digest, -digest], dtype=torch.int64)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    if stepper.host.is_tainted or int(pair[0]) == -int(pair[1]):
        return
    gathered: list[Any] = [None] * stepper.world_size
    names = tuple(stepper.inventory.names)
    dist.all_gather_object(gathered, names)
    if not stepper.host.is_tainted:
        raise TrackError(other_names(stepper.rank, names, gathered))


def add_hint(error: BaseException) -> None:
    """Say where a loader worker's own traceback is to be found; torch loses it."""
    if isinstance(error, RuntimeError) and re.search(LOADER_ENDED, str(error)):
        error.add_note(
            "The loader worker's own traceback is in this rank's log, in front of this one. A "
            "worker that is spawned imports the script again: trainmover.run(main) must stand "
            'under `if __name__ == "__main__":`'
        )


def explained(error: BaseException) -> BaseException:
    """An exception in front of `trainmover.run`, with what it comes from where that is known."""
    if NO_GROUP in str(error):
        told = ScriptError(USED_BEFORE_RUN)
        told.__cause__ = error
        return told
    return error
