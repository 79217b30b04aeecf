"""What `track()` was given, opened: containers, and optimizers that wrap others.

Decides which objects are tracked one by one and under which names; not how they are captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.optim import Optimizer

from trainmover.state.leaves import OuterGroups


def expanded(objects: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Containers and optimizer wrappers opened, the same object kept under its first name."""
    seen: set[int] = set()
    for name, item in objects.items():
        for inner_name, inner in _opened(name, item):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield inner_name, inner


def _opened(name: str, item: object) -> Iterator[tuple[str, object]]:
    if type(item) in (list, tuple):
        for index, inner in enumerate(item):  # type: ignore[arg-type,var-annotated]
            yield from _opened(f"{name}.{index}", inner)
    elif type(item) is dict:
        for key, inner in item.items():
            yield from _opened(f"{name}.{key}", inner)
    elif isinstance(item, Optimizer):
        yield from _opened_optimizer(name, item)
    else:
        yield name, item


def _opened_optimizer(name: str, optimizer: Optimizer) -> Iterator[tuple[str, object]]:
    """The optimizers that really step: those inside a container, a wrapper or ZeRO."""
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, (list, tuple)) and all(isinstance(one, Optimizer) for one in inner):
        for index, one in enumerate(inner):
            yield from _opened_optimizer(f"{name}.{index}", one)
        return
    for attribute in ("optimizer", "optim"):
        wrapped = getattr(optimizer, attribute, None)
        if isinstance(wrapped, Optimizer):
            yield from _opened_optimizer(name, wrapped)
            outer, inner = optimizer.param_groups, wrapped.param_groups
            if not all(any(group is own for own in inner) for group in outer):
                yield f"{name}.outer_groups", OuterGroups(optimizer)
            return
    yield name, optimizer
