"""One update of one rank as data, and the same update made again from it.

For an optimizer whose update is a function of its state, its gradients and its hyper-parameters,
these gradients and hyper-parameters are the whole difference between two versions. Decides what an
increment holds, where each gradient lies in it, and how the optimizer's own code runs on it again.
Does not decide which steps may be told this way, who holds increments, or when they are played.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch
from torch.optim import LBFGS, Optimizer, SparseAdam

from trainmover.errors import StateMismatch, TrackError
from trainmover.protocol.carried import Version
from trainmover.protocol.snapshot_image import aligned
from trainmover.state.codec import decode_plain, encode_plain
from trainmover.state.leaves import load_groups, read_groups
from trainmover.state.tensors import bytes_digest, local_tensor

SCALING: Final = ("grad_scale", "found_inf")
"""What a gradient scaler leaves on an optimizer that unscales by itself."""


class IncrementHead(msgspec.Struct, frozen=True, kw_only=True):
    """All of an increment but the gradients' bytes, which are opaque to whoever holds them."""

    owner_rank: int
    base: Version
    """State that the update was applied to."""
    version: Version
    """State behind it."""
    bulk_bytes: int = 0
    """0: a step without an update (a scaler that skips)."""
    is_void: bool = False
    """Not an increment: what was sent before can't be played any more."""
    base_digest: int = 0
    """Of the parameters at `base`: whoever plays increments sees where it goes wrong."""
    bulk_digest: int = 0
    absent: tuple[int, ...] = ()
    """Parameters without gradient, by place in the optimizer."""
    groups: bytes = b""
    scaling: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(IncrementHead)


def encode_head(head: IncrementHead) -> bytes:
    """Bytes for a control frame or a stream."""
    return _encoder.encode(head)


def decode_head(data: bytes) -> IncrementHead:
    """Raises StateMismatch."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StateMismatch(f"the head of an increment can't be read: {error}") from error


class Block:
    """Memory for the gradients of one increment; used again and again."""

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8)
        self.memory: memoryview = self.tensor.numpy().data
        self.views: list[torch.Tensor] = []
        """Of the layout that captured into it last."""
        self.layout: GradientLayout | None = None


class GradientLayout:
    """Places of one optimizer's gradients in a block."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters = _parameters(optimizer)
        self._offsets: list[int] = []
        end = 0
        for parameter in self.parameters:
            local = local_tensor(parameter)
            self._offsets.append(end)
            end = aligned(end + local.numel() * local.element_size())
        self.size_bytes = end

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has the same parameters."""
        found = _parameters(optimizer)
        return len(found) == len(self.parameters) and all(
            one is other for one, other in zip(found, self.parameters, strict=True)
        )

    def views(self, block: Block) -> list[torch.Tensor]:
        """One tensor per parameter inside `block`."""
        if block.layout is not self:
            block.views = [
                self._view(block, index, local_tensor(parameter))
                for index, parameter in enumerate(self.parameters)
            ]
            block.layout = self
        return block.views

    def _view(self, block: Block, index: int, local: torch.Tensor) -> torch.Tensor:
        if not local.numel():
            return torch.empty(local.shape, dtype=local.dtype)
        start = self._offsets[index]
        flat = block.tensor[start : start + local.numel() * local.element_size()]
        return flat.view(local.dtype).view(local.shape)

    def capture(self, block: Block) -> tuple[int, ...]:
        """Copy every gradient into `block`; places of parameters that have none.

        Raises:
            TrackError: A gradient has another form than its parameter; it is named by its place.
        """
        absent: list[int] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, view in enumerate(self.views(block)):
            gradient = self.parameters[index].grad
            if gradient is None:
                absent.append(index)
                continue
            local = local_tensor(gradient).detach()
            if local.layout != torch.strided or local.dtype != view.dtype:
                raise TrackError(
                    f"the gradient of parameter {index} is {local.layout} {local.dtype}, its "
                    f"parameter is {view.dtype}"
                )
            targets.append(view)
            sources.append(local)
        if targets:
            torch._foreach_copy_(targets, sources)
        return tuple(absent)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def why_not_replayable(optimizer: Optimizer) -> str:
    """Why an update of this kind of optimizer can't be made again from its gradients; or empty."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        return f"{name} evaluates the loss inside of its step"
    if isinstance(optimizer, SparseAdam):
        return f"{name} takes sparse gradients"
    return ""


def head_of_update(
    head: IncrementHead, optimizer: Optimizer, block: Block, absent: tuple[int, ...]
) -> IncrementHead:
    """`head` with what the optimizer is about to apply, whose gradients are in `block`.

    Raises TrackError where a hyper-parameter is not plain data.
    """
    size = block.layout.size_bytes if block.layout is not None else 0
    scaling = {name: getattr(optimizer, name, None) for name in SCALING}
    is_scaled = any(value is not None for value in scaling.values())
    return msgspec.structs.replace(
        head,
        bulk_bytes=size,
        bulk_digest=bytes_digest(block.memory[:size]),
        absent=absent,
        groups=encode_plain(read_groups(optimizer.param_groups), "hyper-parameters"),
        scaling=encode_plain(scaling, "scaling") if is_scaled else b"",
    )


class Player:
    """Makes updates again, on an optimizer whose parameters and state are at the right version."""

    def __init__(self, name: str, optimizer: Optimizer, layout: GradientLayout) -> None:
        self._name = name
        self._optimizer = optimizer
        self._layout = layout
        self._gradients: list[torch.Tensor] = []

    def play(self, head: IncrementHead, block: Block) -> None:
        """One update: gradients, hyper-parameters, the optimizer's own step.

        Raises:
            StateMismatch: Not an increment of this optimizer, or damaged.
        """
        if head.bulk_bytes != self._layout.size_bytes:
            raise StateMismatch(
                f"an increment of {head.bulk_bytes} bytes, the optimizer here has "
                f"{self._layout.size_bytes}"
            )
        if bytes_digest(block.memory[: head.bulk_bytes]) != head.bulk_digest:
            raise StateMismatch(f"the increment of version {head.version.step} is damaged")
        load_groups(self._name, self._optimizer.param_groups, decode_plain(head.groups))
        scaling = decode_plain(head.scaling) if head.scaling else {}
        before = [parameter.grad for parameter in self._layout.parameters]
        try:
            self._put_gradients(head, block)
            self._put_scaling(scaling)
            self._optimizer.step()
        finally:
            for name in scaling:
                if hasattr(self._optimizer, name):
                    delattr(self._optimizer, name)
            for parameter, gradient in zip(self._layout.parameters, before, strict=True):
                parameter.grad = gradient

    def _put_gradients(self, head: IncrementHead, block: Block) -> None:
        parameters = self._layout.parameters
        if not self._gradients:
            # As wide and laid out as the parameter itself; of a DTensor, on its mesh.
            self._gradients = [torch.empty_like(parameter) for parameter in parameters]
        absent = set(head.absent)
        views = self._layout.views(block)
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                if index in absent:
                    parameter.grad = None
                    continue
                local_tensor(self._gradients[index]).copy_(views[index])
                parameter.grad = self._gradients[index]

    def _put_scaling(self, scaling: dict[str, Any]) -> None:
        device = self._layout.parameters[0].device if self._layout.parameters else None
        for name, value in scaling.items():
            is_tensor = isinstance(value, torch.Tensor)
            setattr(self._optimizer, name, value.to(device) if is_tensor else value)
