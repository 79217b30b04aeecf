"""What a script sets once and a checkpoint keeps: where the two differ, the difference is named.

A schedule's length and an optimizer's constants are part of the state: after a restore they are
the checkpoint's, so that the learning rate goes on bit for bit, whatever the script says now.
Decides which values those are and which of their differences may not pass in a strict job. Whether
a script's functions changed (a lambda of a schedule) can't be seen from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from trainmover.errors import StateMismatch
from trainmover.state.inventory import Inventory

OF_SCHEDULES: Final = frozenset(
    [
        "T_0",
        "T_max",
        "T_mult",
        "base_lrs",
        "base_momentums",
        "cooldown",
        "end_factor",
        "eta_min",
        "factor",
        "gamma",
        "max_lrs",
        "max_momentums",
        "milestones",
        "_milestones",
        "min_lrs",
        "mode",
        "patience",
        "power",
        "start_factor",
        "step_size",
        "threshold",
        "total_iters",
        "total_size",
        "total_steps",
    ]
)
"""Attributes of torch's schedules that never change while they run."""
OF_OPTIMIZERS: Final = frozenset(
    [
        "alpha",
        "amsgrad",
        "betas",
        "dampening",
        "eps",
        "initial_lr",
        "lambd",
        "max_lr",
        "maximize",
        "min_lr",
        "momentum",
        "momentum_decay",
        "nesterov",
        "rho",
        "t0",
        "weight_decay",
    ]
)
"""Options of parameter groups that only a schedule or the script itself changes."""
CYCLED: Final = frozenset(("betas", "momentum"))
"""Of them those that a schedule moves where the group has a `base_momentum`."""
NAMED: Final = 5
"""Differences told; of the others only the count."""

Values = Mapping[str, str]


def values_of(inventory: Inventory) -> Values:
    """Each such value of the tracked objects, by its name, as text."""
    found: dict[str, str] = {}
    for name, item in inventory.tracked.items():
        groups = getattr(item, "param_groups", None)
        if isinstance(item, LRScheduler):
            for key, value in item.state_dict().items():
                leaves = _leaves(f"{name}.{key}", value)
                found |= {leaf: text for leaf, text in leaves if _last(leaf) in OF_SCHEDULES}
        elif isinstance(groups, list):
            for number, group in enumerate(groups):
                found |= _of_group(f"{name}.{number}", group, has_rate=not inventory.schedulers)
    return found


def name_differences(here: Values, there: Values, *, is_strict: bool) -> str:
    """One line about what differs; empty where nothing does.

    Args:
        here: `values_of` what the script has built.
        there: The same of what was restored.
        is_strict: Refuse other lengths and shapes of schedules.
    Raises:
        StateMismatch: A schedule differs in a strict job.
    """
    differing = [name for name, text in here.items() if there.get(name, text) != text]
    if not differing:
        return ""
    words = [f"{name} is {there[name]} there and {here[name]} here" for name in differing[:NAMED]]
    more = f"; and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
    text = f"{'; '.join(words)}{more}"
    if is_strict and any(_last(name) in OF_SCHEDULES for name in differing):
        raise StateMismatch(f"the checkpoint is of another schedule: {text} (worker.is_strict)")
    return f"values of the checkpoint go on, not the script's: {text}"


def _of_group(name: str, group: Mapping[str, Any], *, has_rate: bool) -> dict[str, str]:
    wanted = OF_OPTIMIZERS - (CYCLED if "base_momentum" in group else frozenset())
    if has_rate:
        wanted |= {"lr"}
    return {f"{name}.{key}": _text(group[key]) for key in sorted(wanted) if key in group}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and _last(name) not in OF_SCHEDULES:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}.{number}", item)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    """Numbers in full, tensors as numbers; the same words for lists and tuples."""
    if isinstance(value, Mapping):
        return str({key: value[key] for key in sorted(value)})
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) for item in value)}]"
    read = getattr(value, "tolist", None)
    return repr(read() if read is not None else value)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
