"""Puts the gate in front of every tracked optimizer's update.

The gate is entered when gradients are complete: in the optimizer's step pre-hook, or behind the
first call of a closure. Never inside backward: raising there would break autograd (facts: FSDP2
goes silently wrong, DDP refuses the next forward).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trainmover.errors import ScriptError
from trainmover.worker.unwinding import StepUndone

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

NO_GRAPH_TASK = -1


def install(optimizer: torch.optim.Optimizer, stepper: Stepper) -> None:
    """Hook `optimizer`; the hook lives as long as the optimizer."""

    def before_step(
        _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if stepper.increments.is_playing:
            return None
        if torch._C._current_graph_task_id() != NO_GRAPH_TASK:
            raise ScriptError(
                "an optimizer steps inside backward; such a step can't be undone. Step the "
                "optimizer after loss.backward()."
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            enter_gate(stepper, optimizer)
            return None
        wrapped = _gated(closure, stepper, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def after_step(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not stepper.increments.is_playing:
            stepper.increments.stepped()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def enter_gate(stepper: Stepper, optimizer: torch.optim.Optimizer) -> None:
    """The one gate of this step; optimizers that step back to back share it."""
    stepper.increments.stepping(optimizer)
    if stepper.phase == "tail":
        if stepper.tail.is_void:
            raise StepUndone
        if stepper.watch.calls > stepper.watch.calls_at_gate and not stepper.tail.is_repeatable:
            raise ScriptError(
                f"step {stepper.step_index - 1}: a second update with communication in front of it "
                "in one step; such a step can't be undone as one. Give each update its own part: "
                'step.run("generator", fn), step.run("discriminator", fn).'
            )
        return
    if stepper.phase != "running":
        raise ScriptError(
            "a tracked optimizer stepped outside a step; put the update inside `with step:`"
        )
    stepper.gate(has_update=True, part=stepper.part)
    stepper.watch.calls_at_gate = stepper.watch.calls


def _gated(
    closure: Callable[[], Any], stepper: Stepper, optimizer: torch.optim.Optimizer
) -> Callable[[], Any]:
    calls = 0

    def gated() -> Any:
        nonlocal calls
        value = closure()
        calls += 1
        if calls == 1:
            enter_gate(stepper, optimizer)
        return value

    return gated
