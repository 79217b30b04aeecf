"""Gradients as they were at a boundary.

Decides how each kind of starting gradient is remembered: absent, all zeros, or values. Only values
cost a copy. The gradient tensor keeps its identity, because DDP's buckets may be its memory.
"""

from __future__ import annotations

from typing import Final

import torch

from trainmover.state.tensors import local_tensor

_ZERO: Final = None


class GradientUndo:
    """Remembers and restores `.grad` of a list of parameters."""

    def __init__(self, parameters: list[tuple[str, torch.Tensor]]) -> None:
        self._parameters = [parameter for _, parameter in parameters]
        self._present: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def capture(self) -> None:
        """Remember every gradient of now."""
        self._present = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                local = local_tensor(gradient)
                saved = local.detach().clone() if bool(local.any()) else _ZERO
                self._present.append((parameter, gradient, saved))

    def restore(self) -> None:
        """Put every gradient back: absent, zeroed in place, or its values in place."""
        present = {id(parameter) for parameter, _, _ in self._present}
        for parameter in self._parameters:
            if id(parameter) not in present:
                parameter.grad = None
        with torch.no_grad():
            for parameter, gradient, saved in self._present:
                local = local_tensor(gradient).detach()
                if saved is _ZERO:
                    local.zero_()
                else:
                    local.copy_(saved)
                parameter.grad = gradient
