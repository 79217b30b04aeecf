"""What is tracked: every tensor and every small leaf of a rank, by name.

Decides which objects can be captured, how they are named, in which order bulk travels, and when
two ranks are replicas of each other. Does not decide when state is captured or sent. Everything
that can't be captured fails when the inventory is made, with its name, not at a recovery.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.containers import expanded
from trainmover.state.leaves import (
    Leaf,
    OuterGroups,
    buffer_bytes,
    buffer_leaf,
    extra_state_leaves,
    generator_leaf,
    object_state,
    optimizer_leaf,
    outer_groups_leaf,
    scaler_leaf,
    scheduler_leaf,
)
from trainmover.state.manifest import StateEntry, StateManifest
from trainmover.state.optimizer_shape import conform_optimizer
from trainmover.state.slots import (
    OptimizerSlots,
    SeenTensors,
    Slot,
    check_tensor,
    module_slots,
    shard_place,
)
from trainmover.state.tensors import bytes_digest, fold_digests, local_tensor, tensor_digest
from trainmover.units import KIB

SMALL_BUFFERS_BYTES: Final = 512 * KIB
"""Buffers up to this size in all are compared between ranks at each gate."""

BUFFERS: Final = "module buffers"


class Inventory:
    """The tracked state of one rank.

    Attributes:
        identity: 16 hex digits (and more, see `tell_apart`); equal on two ranks exactly if they
            are replicas of each other (names, shapes, dtypes, shard coordinates). Does not depend
            on whether optimizer state exists yet.
        names: Names of the tracked objects and their kinds; must be equal on all ranks. All
            modules are of one kind: stages of a pipeline may be of different classes.
        small_names: Names of the small leaves.
        models: Tracked modules.
        optimizers: Tracked optimizers, the ones that really step (wrappers opened).
        schedulers: Tracked schedulers.
        scalers: Tracked gradient scalers.
        ignored: What the script asked to leave out of the found-but-not-tracked scan.
    """

    def __init__(self, objects: Mapping[str, object], ignore: Sequence[object] = ()) -> None:
        self.ignored = tuple(ignore)
        self.tracked: dict[str, object] = dict(expanded(objects))
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.scalers: list[GradScaler] = []
        self._seen = SeenTensors()
        self._parameters: list[Slot] = []
        self._buffers: list[Slot] = []
        self._objects: list[Slot] = []
        self._optimizer_slots: list[OptimizerSlots] = []
        self._leaves: dict[str, Leaf] = {}
        self._build()
        self._are_buffers_small = self._make_buffer_leaf()
        self.small_names = tuple(self._leaves)
        self.names = tuple(f"{name}: {_kind(item)}" for name, item in self.tracked.items())
        self.identity = self._identity()
        for leaf in self._leaves.values():
            leaf.to_bytes()  # what is not plain data must fail now

    @property
    def names_digest(self) -> int:
        """63-bit digest of `names`."""
        return bytes_digest("\n".join(self.names).encode())

    def _build(self) -> None:
        # Modules first, whatever the order of the arguments: others refer to their parameters.
        rest: list[tuple[str, object]] = []
        for name, item in self.tracked.items():
            if isinstance(item, nn.Module):
                self._add_module(name, item)
            else:
                rest.append((name, item))
        later: list[tuple[str, object]] = []
        for name, item in rest:
            if isinstance(item, Optimizer):
                self._add_optimizer(name, item)
            else:
                later.append((name, item))
        for name, item in later:
            self._add_other(name, item)

    def _make_buffer_leaf(self) -> bool:
        """Small buffers are a small leaf: they may differ by rank although parameters are equal.

        BatchNorm under DDP: each rank's running statistics are its own from forward to the next
        forward, when rank 0's are broadcast. From another replica they would be wrong on rank 0.
        """
        if not self.models:
            return False
        size = sum(buffer_bytes(slot) for slot in self._buffers)
        is_small = size <= SMALL_BUFFERS_BYTES
        # Also where there is nothing in it: stages of one pipeline may differ in what they have,
        # and every rank must show the same small leaves in the gate.
        self._leaves[BUFFERS] = buffer_leaf(BUFFERS, self._buffers if is_small else [])
        return is_small

    def _add_module(self, name: str, module: nn.Module) -> None:
        self.models.append(module)
        for slot in module_slots(name, module, self._seen):
            (self._parameters if slot.kind == "parameter" else self._buffers).append(slot)
        for leaf in extra_state_leaves(name, module):
            self._leaves[leaf.name] = leaf

    def _add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)
        slots = OptimizerSlots(name, optimizer, self._seen)
        self._optimizer_slots.append(slots)
        self._parameters.extend(slots.own_parameters())
        leaf = optimizer_leaf(slots)
        self._leaves[leaf.name] = leaf

    def _add_other(self, name: str, item: object) -> None:
        if isinstance(item, DataLoader):
            raise TrackError(
                f"track({name}=...) got a DataLoader. Read it through job.batches: "
                f"batches = job.batches({name}); that tracks its position"
            )
        if isinstance(item, LRScheduler):
            self.schedulers.append(item)
            leaf = scheduler_leaf(name, item)
        elif isinstance(item, GradScaler):
            self.scalers.append(item)
            leaf = scaler_leaf(name, item)
        elif isinstance(item, torch.Generator):
            leaf = generator_leaf(name, item)
        elif isinstance(item, OuterGroups):
            leaf = outer_groups_leaf(name, item)
        elif isinstance(item, torch.Tensor):
            check_tensor(name, item)
            if self._seen.add(item, name):
                self._objects.append(Slot(name, "object", _reader(item)))
            return
        else:
            state = object_state(name, item, self._seen)
            self._objects.extend(state.slots())
            leaf = state.leaf()
        self._leaves[name] = leaf

    # -- bulk ----------------------------------------------------------------------------------

    def live(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Kind, name and live tensor (DTensors whole) of every bulk entry, in transfer order."""
        buffers = () if self._are_buffers_small else self._buffers
        for slot in (*self._parameters, *buffers):
            tensor = slot.read()
            if tensor is not None:
                yield slot.kind, slot.name, tensor
        for slots in self._optimizer_slots:
            for name, tensor in slots.tensors():
                yield "optimizer", name, tensor
        for slot in self._objects:
            tensor = slot.read()
            if tensor is not None:
                yield slot.kind, slot.name, tensor

    def bulk(self) -> list[tuple[str, torch.Tensor]]:
        """Every bulk entry as (name, live local tensor), in transfer order.

        Parameters, buffers (also non-persistent ones), optimizer state by parameter, large
        tensors of user objects. Tied weights appear once; of a DTensor the local shard.
        """
        return [(name, local_tensor(tensor)) for _, name, tensor in self.live()]

    def unnamed(self) -> Iterator[torch.Tensor]:
        """Live parameters, optimizer tensors and object tensors, fast; in no order of names."""
        for slot in (*self._parameters, *self._objects):
            tensor = slot.read()
            if tensor is not None:
                yield tensor
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                if isinstance(values, dict):
                    yield from (v for v in values.values() if isinstance(v, torch.Tensor))

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter as (name, tensor), DTensors whole."""
        return [(name, tensor) for kind, name, tensor in self._fixed() if kind == "parameter"]

    def buffer_slots(self) -> tuple[Slot, ...]:
        """Places of all buffers, also of those that are None now."""
        return tuple(self._buffers)

    def _fixed(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for slot in self._parameters:
            tensor = slot.read()
            assert tensor is not None
            yield slot.kind, slot.name, tensor

    def manifest(self) -> StateManifest:
        """The list of all bulk entries as they are now."""
        entries = []
        offset = 0
        for kind, name, tensor in self.live():
            local = local_tensor(tensor)
            place = shard_place(tensor)
            size = local.numel() * local.element_size()
            entries.append(
                StateEntry(
                    name=name,
                    kind=kind,
                    shape=tuple(local.shape),
                    dtype=str(local.dtype).removeprefix("torch."),
                    device=local.device.type,
                    offset=offset,
                    size_bytes=size,
                    global_offset=place.offset,
                    is_sharded=local is not tensor,
                )
            )
            offset += size
        return StateManifest(
            identity=self.identity, entries=tuple(entries), small_names=self.small_names
        )

    def conform(self, manifest: StateManifest) -> None:
        """Create or drop optimizer state (and buffers) so that `bulk()` has the given entries.

        Contents of what is created are zeros; a transfer fills them.

        Raises:
            StateMismatch: Parameters, objects or small leaves differ; the first is named.
        """
        self._check_same(manifest)
        if manifest.identity.startswith(f"{self.identity}:"):
            self.identity = manifest.identity
        self._conform_buffers(manifest)
        for slots in self._optimizer_slots:
            conform_optimizer(slots, manifest)
        mine = self.manifest().entries
        if len(mine) != len(manifest.entries):
            raise StateMismatch(f"{len(manifest.entries)} entries expected, {len(mine)} here")
        for here, there in zip(mine, manifest.entries, strict=True):
            if (here.name, here.shape, here.dtype) != (there.name, there.shape, there.dtype):
                raise StateMismatch(f"{_described(there)} expected, {_described(here)} here")

    def _check_same(self, manifest: StateManifest) -> None:
        if manifest.small_names != self.small_names:
            first = _first_difference(manifest.small_names, self.small_names)
            raise StateMismatch(f"tracked objects differ: {first}")
        theirs = [e for e in manifest.entries if e.kind in ("parameter", "object")]
        mine = [e for e in self.manifest().entries if e.kind in ("parameter", "object")]
        described = ([_described(e) for e in theirs], [_described(e) for e in mine])
        if described[0] != described[1]:
            raise StateMismatch(f"bulk state differs: {_first_difference(*described)}")

    def _conform_buffers(self, manifest: StateManifest) -> None:
        if self._are_buffers_small:
            return
        wanted = {entry.name: entry for entry in manifest.entries if entry.kind == "buffer"}
        for slot in self._buffers:
            entry = wanted.pop(slot.name, None)
            current = slot.read()
            assert slot.replace is not None
            if entry is None:
                slot.replace(None)
                continue
            dtype = getattr(torch, entry.dtype)
            if current is None or (
                (tuple(local_tensor(current).shape), current.dtype) != (entry.shape, dtype)
            ):
                device = "cpu" if entry.device == "cpu" else self._device()
                slot.replace(torch.zeros(entry.shape, dtype=dtype, device=device))
        for name in wanted:
            raise StateMismatch(f"buffer {name} exists where the state comes from and not here")

    def _device(self) -> torch.device:
        for slot in self._parameters:
            tensor = slot.read()
            if tensor is not None:
                return tensor.device
        return torch.device("cpu")

    def parameter_digest(self) -> int:
        """63-bit digest of the values of all parameters here."""
        fixed = [(name, tensor_digest(local_tensor(t))) for name, t in self.parameters()]
        return fold_digests(fixed)

    def tell_apart(self, values: int) -> None:
        """Make the parameters' first values part of the identity: another rank of equal names and
        shapes had others. A joiner takes the identity over from whoever its state comes from."""
        self.identity = f"{self.identity.partition(':')[0]}:{values:x}"

    def bulk_digests(self) -> dict[str, int]:
        """63-bit digest of each bulk entry, in transfer order."""
        return {name: tensor_digest(tensor) for name, tensor in self.bulk()}

    def bulk_digest(self) -> int:
        """63-bit digest of all bulk bytes and names."""
        return fold_digests(list(self.bulk_digests().items()))

    # -- small leaves ----------------------------------------------------------------------------

    def small_bytes(self, name: str) -> bytes:
        """Encoded plain data of a small leaf."""
        return self._leaf(name).to_bytes()

    def load_small(self, name: str, data: bytes) -> None:
        """Put encoded plain data into a small leaf's object."""
        self._leaf(name).from_bytes(data)

    def small_digest(self, name: str) -> int:
        """63-bit digest of a small leaf."""
        return bytes_digest(self.small_bytes(name))

    def _leaf(self, name: str) -> Leaf:
        if name not in self._leaves:
            raise StateMismatch(f"no small leaf {name!r}; tracked: {', '.join(self._leaves)}")
        return self._leaves[name]

    def _identity(self) -> str:
        digest = xxhash.xxh3_64()
        fixed = [
            (slot.kind, slot.name, slot.read()) for slot in (*self._parameters, *self._objects)
        ]
        fixed += [(slot.kind, slot.name, slot.read()) for slot in self._buffers]
        for kind, name, tensor in fixed:
            if tensor is None:
                continue
            local = local_tensor(tensor)
            place = shard_place(tensor)
            digest.update(
                f"{kind} {name} {tuple(local.shape)} {local.dtype} "
                f"{place.offset} {place.description}\n".encode()
            )
        for slots in self._optimizer_slots:
            kind = type(slots.optimizer).__name__
            digest.update(f"{slots.name} {kind} {slots.parameter_names()}\n".encode())
        return digest.hexdigest()


def _kind(item: object) -> str:
    """What all ranks must agree on; parts of one model may be of several classes."""
    return "Module" if isinstance(item, nn.Module) else type(item).__name__


def _reader(tensor: torch.Tensor) -> Any:
    return lambda: tensor


def _described(entry: StateEntry) -> str:
    place = f" at {list(entry.global_offset)}" if entry.global_offset else ""
    return f"{entry.kind} {entry.name} {list(entry.shape)} {entry.dtype}{place}"


def _first_difference(theirs: Sequence[str], mine: Sequence[str]) -> str:
    for index in range(max(len(theirs), len(mine))):
        there = theirs[index] if index < len(theirs) else "nothing"
        here = mine[index] if index < len(mine) else "nothing"
        if there != here:
            return f"{there} where the state comes from, {here} here"
    return "no difference"
