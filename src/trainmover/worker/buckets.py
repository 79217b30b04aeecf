"""DDP's gradient buckets: where each process stands with them, and a start over for all.

DDP lays out its buckets anew once per model, in the forward behind its first backward; a static
graph one iteration later. So how many iterations a model has had decides what a rank calls next,
and neither steps nor attempts tell that number: a closure is called several times, a part has
models of its own. Decides whether any layout is still the first one, and makes all of them so
(decision 0013). Which ranks do that, and when, is the plan's decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainmover.state.inventory import Inventory
from trainmover.worker.live_objects import live_objects

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

BUILTIN_HOOK = "BuiltinCommHookType."


class Buckets:
    """Of the DDP modules of one entry of `main`. Main thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._modules: tuple[DistributedDataParallel, ...] | None = None
        self._are_all_laid_out = False
        self.renewed_at = 0
        """Attempts begun when all started over."""

    @property
    def modules(self) -> tuple[DistributedDataParallel, ...]:
        """DDP modules of the tracked models; looked for once, when `main` is built."""
        if self._modules is None:
            self._modules = ddp_modules(self._stepper.inventory)
        return self._modules

    @property
    def are_first(self) -> bool:
        """Whether some module that lays out its buckets anew has not done so yet."""
        if not self._are_all_laid_out:
            self._are_all_laid_out = all(map(_is_laid_out, self.modules))
        return not self._are_all_laid_out

    def renew(self) -> None:
        """All modules as in a new process. Collective: no, but all ranks do it at one boundary."""
        stepper = self._stepper
        if not self.modules:
            return
        for module in self.modules:
            renew(module)
        self._are_all_laid_out = False
        self.renewed_at = stepper.attempts
        stepper.watch.forget()
        if stepper.first is not None:
            stepper.first.undone()


def ddp_modules(inventory: Inventory) -> tuple[DistributedDataParallel, ...]:
    """DDP modules in tracked models, and those around a tracked model."""
    inside = [module for model in inventory.models for module in model.modules()]
    found = [module for module in inside if isinstance(module, DistributedDataParallel)]
    known, wrapped = set(map(id, found)), set(map(id, inside))
    for item in live_objects([DistributedDataParallel]) if inside else ():
        if id(item) not in known:
            model = item.__dict__.get("_modules", {}).get("module")
            if id(model) in wrapped:
                found.append(item)
    return tuple(found)


def _is_laid_out(module: DistributedDataParallel) -> bool:
    state: Any = module
    has_one_layout = state.find_unused_parameters and not state.static_graph
    is_bypassed = state._use_python_reducer or state._delay_all_reduce_all_params
    return bool(has_one_layout or is_bypassed or state._has_rebuilt_buckets)


def renew(module: DistributedDataParallel) -> None:
    """Give `module` a reducer as its constructor made it. Parameters and gradients stay."""
    state: Any = module
    # Held meanwhile: hooks of the script hang on these nodes, which the reducer alone may keep.
    nodes: list[Any] = [
        node.next_functions
        for parameter in module.parameters()
        if parameter.requires_grad and (node := parameter.expand_as(parameter).grad_fn) is not None
    ]
    builtin = state.logger._get_ddp_logging_data().strs_map.get("comm_hook", "")
    state.reducer._remove_autograd_hooks()
    # First the old buckets go: at no time are there two sets of them.
    state.reducer = state.logger = None
    parameters, is_sparse = state._build_params_for_reducer()
    names = state._build_debug_param_to_name_mapping(parameters)
    state._ddp_init_helper(parameters, is_sparse, names, state.static_graph)
    _register_hooks(state, builtin)
    if state.mixed_precision is not None:
        state.reducer._set_mixed_precision_param_dtype(state.mixed_precision.param_dtype)
    if state.static_graph:
        state._static_graph_delay_allreduce_enqueued = False
        state.reducer._set_static_graph()
        state.logger._set_static_graph()
    state._has_rebuilt_buckets = False
    # An attempt may have been left between two backwards of an accumulation.
    state.require_forward_param_sync = True
    del nodes


def _register_hooks(module: Any, builtin: str) -> None:
    for hook, argument in module._comm_hooks:
        module.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(module.reducer, argument, hook)
    if not module._comm_hooks and builtin.startswith(BUILTIN_HOOK):
        kind = getattr(dist.BuiltinCommHookType, builtin.removeprefix(BUILTIN_HOOK))
        module._register_builtin_comm_hook(kind)
