"""Random and other state of a loader's samplers.

Decides which objects of a loader belong to its position besides the count of batches: generators
of the loader and its samplers (also nested ones), samplers with state of their own, and which of
them know a rank or an epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.codec import decode_plain, encode_plain

_RANK_PAIRS: Final = (
    ("rank", "num_replicas"),
    ("rank", "world_size"),
    ("process_index", "num_processes"),
    ("local_rank", "num_replicas"),
)
_RANK_NAMES: Final = ("rank", "process_index", "shard_id", "worker_rank", "dp_rank", "shard_index")
_DEPTH: Final = 4


def samplers_of(loader: Any) -> list[Any]:
    """Every sampler object reachable from a loader, outermost first."""
    found: list[Any] = []
    for name in ("batch_sampler", "sampler"):
        _collect(getattr(loader, name, None), found, 0)
    return found


def _collect(candidate: Any, found: list[Any], depth: int) -> None:
    if candidate is None or depth > _DEPTH or any(candidate is one for one in found):
        return
    if not (isinstance(candidate, Sampler) or depth == 0):
        return
    found.append(candidate)
    for value in _attributes(candidate).values():
        if isinstance(value, Sampler):
            _collect(value, found, depth + 1)


def _attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler (and an iterable dataset) that has `set_epoch` which epoch begins."""
    dataset = getattr(loader, "dataset", None)
    targets = samplers_of(loader)
    if isinstance(dataset, IterableDataset):
        targets.append(dataset)
    for target in targets:
        method = getattr(target, "set_epoch", None)
        if callable(method):
            method(epoch)


@dataclass(frozen=True, slots=True)
class RankChange:
    """From which rank of how many to which; None: not known, any sampler's rank is meant."""

    after: int
    before: int | None = None
    world_size: int | None = None

    def concerns(self, rank: int, count: int) -> bool:
        """Whether a sampler that reads part `rank` of `count` reads it because of the job's rank.

        Ranks that hold parts of one model read the same data: their samplers count fewer parts
        than there are ranks, and which one they read is the script's arithmetic.
        """
        is_by_rank = self.world_size is None or count == self.world_size
        return is_by_rank and (self.before is None or rank in (self.before, self.after))


def set_rank(loader: Any, change: RankChange) -> tuple[bool, bool]:
    """Change the rank inside every sampler that knows the job's.

    Returns:
        Whether nothing else is known to hold a rank; whether any sampler's rank changed.
    """
    is_free, has_changed = True, False
    for sampler in samplers_of(loader):
        attributes = _attributes(sampler)
        pair = next((p for p in _RANK_PAIRS if p[0] in attributes and p[1] in attributes), None)
        if pair is not None and isinstance(attributes[pair[0]], int):
            if change.concerns(attributes[pair[0]], attributes[pair[1]]):
                has_changed = has_changed or attributes[pair[0]] != change.after
                setattr(sampler, pair[0], change.after)
            else:
                is_free = False
        elif any(name in attributes for name in _RANK_NAMES):
            is_free = False
    dataset = _attributes(getattr(loader, "dataset", None))
    return is_free and not any(name in dataset for name in _RANK_NAMES), has_changed


def knows_rank(loader: Any) -> bool:
    """Whether a sampler or the dataset holds what looks like a rank."""
    holders = [*samplers_of(loader), getattr(loader, "dataset", None)]
    return any(name in _attributes(holder) for holder in holders for name in _RANK_NAMES)


def capture_samplers(loader: Any) -> bytes:
    """State of the samplers and of the generators that they and the loader own."""
    generators = [_generator_state(one) for one in _generators(loader)]
    states = [sampler.state_dict() for sampler in _stateful(loader)]
    return encode_plain([generators, states], "state of the loader's samplers")


def restore_samplers(loader: Any, data: bytes) -> None:
    """Put captured sampler state back.

    Raises:
        StateMismatch: The loader here has other samplers.
    """
    states = decode_plain(data)[1]
    stateful = list(_stateful(loader))
    if len(stateful) != len(states):
        raise StateMismatch(
            f"the loader has {len(stateful)} samplers with state here, {len(states)} where its "
            "position comes from"
        )
    for sampler, state in zip(stateful, states, strict=True):
        sampler.load_state_dict(state)
    restore_generators(loader, data)


def restore_generators(loader: Any, data: bytes) -> None:
    """Put only the generators of captured sampler state back.

    Raises:
        StateMismatch: The loader here has other generators.
    """
    states = decode_plain(data)[0]
    generators = list(_generators(loader))
    if len(generators) != len(states):
        raise StateMismatch(
            f"the loader has {len(generators)} generators here, {len(states)} where its position "
            "comes from"
        )
    for generator, state in zip(generators, states, strict=True):
        _load_generator(generator, state)


def _stateful(loader: Any) -> Iterator[Any]:
    for sampler in samplers_of(loader):
        if callable(getattr(sampler, "state_dict", None)) and callable(
            getattr(sampler, "load_state_dict", None)
        ):
            yield sampler


_GENERATOR_KINDS: Final = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


def generators_of(holder: Any) -> list[str]:
    """Names of the attributes of `holder` that are random generators."""
    attributes = sorted(_attributes(holder).items())
    return [name for name, value in attributes if isinstance(value, _GENERATOR_KINDS)]


def _generators(loader: Any) -> Iterator[Any]:
    seen: set[int] = set()
    for holder in (loader, *samplers_of(loader)):
        for _, value in sorted(_attributes(holder).items()):
            if isinstance(value, _GENERATOR_KINDS) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    raise TrackError(f"a {type(generator).__name__} is not a generator that can be captured")


def _load_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
