"""Undo of an interrupted step: everything a step changes before its gate, as it was.

Decides what a step may have changed by the time its gate fails: random generators, small leaves,
buffers, gradients, a scaler's stage per optimizer, batches handed out. Parameters and optimizer
state must not change before the gate; `changed_bulk` shows whether they did. Objects of DDP and
FSDP2 are never touched: their step has run out to its end by itself.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from trainmover.errors import ScriptError
from trainmover.state.gradients import GradientUndo
from trainmover.state.inventory import Inventory
from trainmover.state.rng import capture_rng, restore_rng
from trainmover.state.slots import Slot
from trainmover.state.tensors import local_tensor, tensor_digest, tensor_version
from trainmover.units import MIB

ALWAYS_KEPT_BYTES: Final = 1 * MIB
"""Buffers up to this size in all are copied at every boundary."""

WATCHED_CAPTURES: Final = 4
"""Boundaries at which all buffers are copied, to learn which of them steps change."""


class Rewindable(Protocol):
    """What undo needs of `worker.batches.Batches`."""

    def begin_attempt(self) -> None:
        """From now on batches belong to this attempt."""

    def rewind(self) -> None:
        """Hand the attempt's batches out again."""


class UndoSet:
    """Captures a boundary and puts it back.

    Called on: the training thread, between steps (`capture`) and once the interrupted step has
    run out (`restore`).
    """

    def __init__(self, inventory: Inventory, batches: Sequence[Rewindable]) -> None:
        self._inventory = inventory
        self._batches = batches
        self._rng = b""
        self._smalls: Mapping[str, bytes] = {}
        self._buffers = BufferUndo(inventory.buffer_slots())
        self._gradients = GradientUndo(inventory.parameters())
        self._scalers = [ScalerUndo(scaler) for scaler in inventory.scalers]
        self._bulk: list[torch.Tensor] = []
        self._bulk_versions: list[int] = []

    def capture(self, rng: bytes | None = None, smalls: Mapping[str, bytes] | None = None) -> None:
        """Remember the boundary at which the next step begins.

        Args:
            rng: `capture_rng()` of this instant, where it was taken already.
            smalls: Every small leaf's bytes of this instant, likewise.
        """
        self._rng = capture_rng() if rng is None else rng
        inventory = self._inventory
        if smalls is None:
            smalls = {name: inventory.small_bytes(name) for name in inventory.small_names}
        self._smalls = smalls
        self._buffers.capture()
        self._gradients.capture()
        for scaler in self._scalers:
            scaler.capture()
        self._bulk, self._bulk_versions = self._versions()
        for batches in self._batches:
            batches.begin_attempt()

    def restore(self, *, rewinds: bool = True) -> None:
        """Put everything back as it was at the boundary; tensors keep their identity.

        Args:
            rewinds: Batches of the attempt are handed out again; False: the caller moves loaders.
        Raises:
            ScriptError: A buffer changed that never did before, so no copy of it was kept.
        """
        self._gradients.restore()
        self._buffers.restore()
        for scaler in self._scalers:
            scaler.restore()
        inventory = self._inventory
        for name, data in self._smalls.items():
            if inventory.small_bytes(name) != data:
                inventory.load_small(name, data)
        for batches in self._batches if rewinds else ():
            batches.rewind()
        restore_rng(self._rng)

    def changed_bulk(self) -> list[str]:
        """Names of parameters, optimizer tensors and object tensors written since `capture`.

        By torch's version counters: writes through `.data` or numpy are not seen.
        """
        tensors, versions = self._versions()
        if versions == self._bulk_versions and _are_same(tensors, self._bulk):
            return []
        known = dict(zip(map(id, self._bulk), self._bulk_versions, strict=True))
        changed = []
        for kind, name, tensor in self._inventory.live():
            local = local_tensor(tensor)
            if kind != "buffer" and known.pop(id(local), None) != tensor_version(local):
                changed.append(name)
        return changed or ["optimizer state that is gone now"]

    def _versions(self) -> tuple[list[torch.Tensor], list[int]]:
        # Without names: this runs at every boundary, names are needed for a message only.
        tensors = [local_tensor(tensor) for tensor in self._inventory.unnamed()]
        return tensors, [tensor_version(tensor) for tensor in tensors]


def _are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


class BufferUndo:
    """Pre-images of buffers.

    All of them while they are small or still being watched; later those that steps were seen to
    change. The others are checked by version only.
    """

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self._slots = slots
        self._captures = 0
        self._changing: set[str] = set()
        self._images: dict[str, torch.Tensor] = {}
        self._known: dict[str, tuple[torch.Tensor | None, int]] = {}
        self._digests: dict[str, int] = {}
        size = sum(_size_bytes(slot.read()) for slot in slots)
        self._are_all_kept = size <= ALWAYS_KEPT_BYTES

    def capture(self) -> None:
        """Remember every buffer object, and the contents of those that steps change."""
        keep_all = self._are_all_kept or self._captures < WATCHED_CAPTURES
        if not self._are_all_kept and self._captures <= WATCHED_CAPTURES:
            self._learn()
        self._captures += 1
        targets, sources = [], []
        self._known = {}
        for slot in self._slots:
            tensor = slot.read()
            self._known[slot.name] = (tensor, tensor_version(tensor) if tensor is not None else 0)
            if tensor is None or not (keep_all or slot.name in self._changing):
                self._images.pop(slot.name, None)
                continue
            local = local_tensor(tensor).detach()
            targets.append(self._image(slot.name, local))
            sources.append(local)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def _image(self, name: str, like: torch.Tensor) -> torch.Tensor:
        image = self._images.get(name)
        if image is None or image.shape != like.shape or image.dtype != like.dtype:
            image = self._images[name] = torch.empty_like(like)
        return image

    def _learn(self) -> None:
        """Note which buffers changed in the watched steps, by version and by digest.

        The digest sees writes through `.data`, which no version counter does.
        """
        for slot in self._slots:
            tensor = slot.read()
            digest = tensor_digest(local_tensor(tensor)) if tensor is not None else 0
            known = self._known.get(slot.name)
            if known is not None and (
                known[0] is not tensor
                or (tensor is not None and tensor_version(tensor) != known[1])
                or self._digests[slot.name] != digest
            ):
                self._changing.add(slot.name)
            self._digests[slot.name] = digest

    def restore(self) -> None:
        """Put buffers back in place; a replaced buffer object is put back as well."""
        for slot in self._slots:
            before, version = self._known[slot.name]
            now = slot.read()
            image = self._images.get(slot.name)
            if image is None and (now is not before or _version(now) != version):
                self._changing.add(slot.name)
                raise ScriptError(
                    f"buffer {slot.name} changed in this step and in none of the first "
                    f"{WATCHED_CAPTURES}, so no copy was kept and the step can't be undone in place"
                )
            if now is not before:
                assert slot.replace is not None
                slot.replace(before)
            if before is not None and image is not None:
                with torch.no_grad():
                    local_tensor(before).detach().copy_(image)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor_version(tensor)


def _size_bytes(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


class ScalerUndo:
    """The stage a gradient scaler keeps per optimizer, which its state_dict leaves out.

    An undone step leaves it at UNSCALED; without this the repeat would skip unscaling.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler: Any = scaler
        self._stages: dict[int, dict[str, Any]] = {}

    def capture(self) -> None:
        """Remember the stages; none, at a usual boundary."""
        self._stages = self._copied(self._live())

    def restore(self) -> None:
        """Put the stages back."""
        states = self._live()
        states.clear()
        states.update(self._copied(self._stages))

    def _live(self) -> dict[int, dict[str, Any]]:
        """The scaler's own table; a disabled scaler (`enabled=False`) has none."""
        states: dict[int, dict[str, Any]] = getattr(self._scaler, "_per_optimizer_states", {})
        return states

    @staticmethod
    def _copied(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            key: {
                "stage": state["stage"],
                "found_inf_per_device": {
                    device: found.clone() for device, found in state["found_inf_per_device"].items()
                },
                **{
                    name: copy.copy(value)
                    for name, value in state.items()
                    if name not in ("stage", "found_inf_per_device")
                },
            }
            for key, state in states.items()
        }
