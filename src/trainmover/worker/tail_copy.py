"""What a rank had in front of its last gate: one copy, kept until the next gate passes.

Decides what is copied (parameters, optimizer state, tensors of tracked objects; small leaves,
buffers and gradients are in the boundary's undo set already) and how it is put back. Whether copies
are kept is agreed in the gate; when they are used is `tail`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainmover.state.tensors import local_tensor
from trainmover.state.undo import UndoSet

if TYPE_CHECKING:
    from trainmover.protocol.messages import Version
    from trainmover.state.manifest import StateManifest
    from trainmover.worker.personal import Personal
    from trainmover.worker.stepper import Stepper


HOST = torch.device("cpu")


class TailCopy:
    """Of one entry of `main`. Its memory is used again from step to step."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.version: Version | None = None
        """What the copy is of; None: there is none."""
        self.personal: Personal | None = None
        """Own leaves of that version."""
        self._manifest: StateManifest | None = None
        self._copied: list[torch.Tensor] = []
        self._images: list[torch.Tensor] = []
        self._undo: UndoSet | None = None
        self._spare: UndoSet | None = None

    @property
    def size_bytes(self) -> int:
        """What a copy takes."""
        tensors = map(local_tensor, self._live())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def is_in_front_of(self, version: Version) -> bool:
        """Whether the copy is of the version one gate before `version`."""
        return self.version is not None and self.version.step == version.step - 1

    # ------------------------------------------------------------------ keeping

    def capture(self, *, is_on_host: bool = False) -> None:
        """The gate has passed and nothing is updated yet. `is_on_host`: use no device memory."""
        stepper = self._stepper
        self.version = None
        live = self._live()
        if not _are_same(live, self._copied):
            self._manifest = stepper.inventory.manifest()
            self._copied = live
        locals_ = [local_tensor(tensor).detach() for tensor in live]
        devices = [HOST if is_on_host else tensor.device for tensor in locals_]
        if not _fit(self._images, locals_, devices):
            self._images = []  # what does not fit is gone before there is anything new
            self._images = [
                torch.empty_like(tensor, device=device)
                for tensor, device in zip(locals_, devices, strict=True)
            ]
        _copy(self._images, locals_)
        if self._undo is not None:
            self._spare, self._undo = self._undo, None
        self.personal = stepper.boundary_personal
        self.version = stepper.version

    def drop(self) -> None:
        """Nobody keeps one any more."""
        self.version = self.personal = self._manifest = self._undo = self._spare = None
        self._copied, self._images = [], []

    def hand_over(self, undo: UndoSet) -> UndoSet:
        """At the boundary behind the gate: keep the undo set of the one in front of it.

        Returns the one to capture this boundary with.
        """
        stepper = self._stepper
        if self._undo is not None or not self.is_in_front_of(stepper.version):
            return undo
        fresh, self._spare = self._spare, None
        self._undo = undo
        return fresh if fresh is not None else UndoSet(stepper.inventory, stepper.batches)

    def _live(self) -> list[torch.Tensor]:
        entries = self._stepper.inventory.live()
        return [tensor for kind, _, tensor in entries if kind != "buffer"]

    # ------------------------------------------------------------------ going back

    def put_back_bulk(self) -> None:
        """Parameters and optimizer state as in front of the gate; what came since is dropped."""
        assert self._manifest is not None
        inventory = self._stepper.inventory
        inventory.conform(self._manifest)
        live = self._live()
        _copy([local_tensor(tensor).detach() for tensor in live], self._images)
        self._copied = []
        self.version = None

    def put_back(self) -> None:
        """All but own leaves. Raises ScriptError where a buffer was not kept."""
        self.put_back_bulk()
        undo = self._undo if self._undo is not None else self._stepper.undo_set
        assert undo is not None
        undo.restore(rewinds=False)


def _are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _fit(
    images: list[torch.Tensor], tensors: list[torch.Tensor], devices: list[torch.device]
) -> bool:
    return len(images) == len(tensors) and all(
        (image.shape, image.dtype, image.device) == (tensor.shape, tensor.dtype, device)
        for image, tensor, device in zip(images, tensors, devices, strict=True)
    )


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
