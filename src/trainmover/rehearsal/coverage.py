"""What a joiner does for the first time although it has rehearsed.

Decides what counts as new: a compiled graph, a collective of another kind or shape, a module that
is called for the first time or with other shapes. Watched on the joiner alone, for some steps, each
with the milliseconds it took. Modules are not watched where torch.compile is at work: hooks would
change what it compiles, and its own counters say more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from trainmover.communicator.call import Call
from trainmover.communicator.communicator import Communicator
from trainmover.communicator.operation import Operation
from trainmover.protocol.messages import Uncovered
from trainmover.rehearsal.calls import CallShape, Describer
from trainmover.rehearsal.sandbox import without_group

PARTS_MAX = 50
"""Most things told of one adoption."""

Signature = tuple[str, tuple[tuple[int, ...], ...]]


def compiled_graphs() -> int:
    """Graphs torch.compile has made in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def is_compiling() -> bool:
    """Whether the script has asked torch.compile for anything so far."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = [] if frames is None else list(frames.cached_backends.values())
    return compiled_graphs() > 0 or any(backend is not None for backend in backends)


def _compilations() -> list[Any]:
    utils = sys.modules.get("torch._dynamo.utils")
    return [] if utils is None else list(utils.get_compilation_metrics())


class _Modules:
    """Calls of modules, as long as it is watching."""

    def __init__(self) -> None:
        self.called: dict[Signature, float] = {}
        """Milliseconds of each call that was new."""
        self.known: set[Signature] = set()
        self._names: dict[int, str] = {}
        self._began: dict[int, tuple[Signature, float]] = {}
        self._handles: list[Any] = []

    def begin(self, models: Sequence[nn.Module]) -> None:
        self._names = {
            id(child): name or type(child).__name__
            for model in models
            for name, child in model.named_modules()
        }
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._entered),
            nn_module.register_module_forward_hook(self._left),
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._began = {}

    def _entered(self, module: nn.Module, arguments: Any) -> None:
        name = self._names.get(id(module), type(module).__name__)
        shapes = tuple(tuple(a.shape) for a in arguments if isinstance(a, torch.Tensor))
        signature = (name, shapes)
        if signature not in self.known:
            self._began[id(module)] = (signature, time.perf_counter())

    def _left(self, module: nn.Module, arguments: Any, result: Any) -> None:
        begun = self._began.pop(id(module), None)
        if begun is not None:
            signature, began_s = begun
            self.known.add(signature)
            self.called[signature] = (time.perf_counter() - began_s) * 1e3


class Learned:
    """What one entry's rehearsal has seen."""

    def __init__(self, calls: set[CallShape]) -> None:
        self.calls = calls
        self.modules: _Modules | None = None
        self._iterations = 0

    def begin_iteration(self, models: Sequence[nn.Module]) -> None:
        """A shadow iteration starts; modules are watched from the second one on, if nothing has
        been compiled in the first."""
        self._iterations += 1
        if self._iterations == 2 and not is_compiling():
            self.modules = _Modules()
        if self.modules is not None:
            self.modules.begin(models)

    def end_iteration(self) -> None:
        """It is over."""
        if self.modules is not None:
            self.modules.end()


class CoverageWatch:
    """One joiner after its adoption."""

    def __init__(
        self, communicator: Communicator, learned: Learned, workers_per_machine: int, steps: int
    ) -> None:
        """Watch the next `steps` steps against what was `learned`."""
        self._communicator = communicator
        self._known = set(learned.calls)
        self._modules = learned.modules
        self._workers_per_machine = workers_per_machine
        self._describer = Describer(workers_per_machine)
        self._steps_left = steps
        self._parts_left = PARTS_MAX
        self._compiled = len(_compilations())
        self._new: list[tuple[str, list[float]]] = []

    @property
    def is_over(self) -> bool:
        """Whether enough has been watched."""
        return self._steps_left <= 0

    def begin_step(self, models: Sequence[nn.Module]) -> None:
        """A step starts."""
        self._communicator.interpose(self._start)
        if self._modules is not None:
            self._modules.called = {}
            self._modules.begin(models)

    def end_step(self, step: int) -> tuple[Uncovered, ...]:
        """It is over: what was new in it."""
        self._communicator.interpose(None)
        parts = [*self._recompilations(step), *self._module_calls(step)]
        for what, took in self._new:
            # One that nobody has waited for yet has cost nothing so far.
            parts.append(Uncovered(kind="collective", what=what, step=step, ms=sum(took)))
        self._new = []
        self._steps_left -= 1
        parts = parts[: self._parts_left]
        self._parts_left -= len(parts)
        return tuple(parts)

    def _recompilations(self, step: int) -> list[Uncovered]:
        done = _compilations()
        new, self._compiled = done[self._compiled :], len(done)
        return [
            Uncovered(
                kind="recompilation",
                what=f"{each.co_name} ({each.co_filename}:{each.co_firstlineno})"
                if each.co_name
                else "a backward graph",
                step=step,
                ms=(each.entire_frame_compile_time_s or 0.0) * 1e3,
            )
            for each in new
        ]

    def _module_calls(self, step: int) -> list[Uncovered]:
        if self._modules is None:
            return []
        self._modules.end()
        return [
            Uncovered(
                kind="module",
                what=f"{name} on {', '.join(str(list(shape)) for shape in shapes)}",
                step=step,
                ms=ms,
            )
            for (name, shapes), ms in self._modules.called.items()
        ]

    def _start(self, call: Call) -> Operation | None:
        shape = without_group(self._describer.describe(call))
        began_s = time.perf_counter()
        operation = Communicator.start(self._communicator, call)
        if shape in self._known:
            return operation
        self._known.add(shape)
        took: list[float] = []
        self._new.append((shape.words(), took))
        if operation is None:
            took.append((time.perf_counter() - began_s) * 1e3)
        else:
            operation.future.add_done_callback(
                lambda _: took.append((time.perf_counter() - began_s) * 1e3)
            )
        return operation
