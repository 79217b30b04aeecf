"""Start-up self-check: is this torch one whose inner workings we rely on correctly?

Decides between going on, one line of warning, and refusing. What is checked are the habits that
exactness hangs on: step pre-hooks run before the update and may change arguments; a Python process
group receives the collectives DDP, FSDP2 and DTensor call; no autograd graph task means -1.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from trainmover.errors import IncompatibleMachine

TESTED = ("2.13",)
"""Release lines of torch that the test-suite runs on."""

NEEDED_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "broadcast",
    "alltoall",
    "alltoall_base",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)

NEEDED_OF_DDP = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_ddp_init_helper",
)
NEEDED_OF_REDUCER = ("_remove_autograd_hooks", "_rebuild_buckets", "_set_static_graph")


def check_torch(group: type[ProcessGroup]) -> str:
    """Check the torch of this process against what `group` (our process group) offers.

    Returns: One line worth saying, or an empty string.
    Raises:
        IncompatibleMachine: Going on could change numbers; the message names what differs.
    """
    missing = [name for name in NEEDED_METHODS if not callable(getattr(group, name, None))]
    if missing:
        raise IncompatibleMachine(
            f"torch {torch.__version__} calls collectives this process group lacks: "
            f"{', '.join(missing)}; use torch {' or '.join(TESTED)}"
        )
    _check_hook_order()
    _check_ddp()
    if torch._C._current_graph_task_id() != -1:
        raise IncompatibleMachine(
            f"torch {torch.__version__}: expected graph task -1 outside of backward, got "
            f"{torch._C._current_graph_task_id()}; use torch {' or '.join(TESTED)}"
        )
    line = ".".join(torch.__version__.split(".")[:2])
    if line in TESTED:
        return ""
    return (
        f"torch {torch.__version__} is not one of the tested release lines "
        f"({', '.join(TESTED)}); its self-check passed"
    )


def _check_ddp() -> None:
    """A plan may have all ranks start over with DDP's buckets (worker/buckets.py)."""
    made = torch.nn.parallel.DistributedDataParallel
    missing = [name for name in NEEDED_OF_DDP if not callable(getattr(made, name, None))]
    missing += [name for name in NEEDED_OF_REDUCER if not hasattr(torch.distributed.Reducer, name)]
    if missing:
        raise IncompatibleMachine(
            f"torch {torch.__version__}: DistributedDataParallel lacks {', '.join(missing)}; "
            f"use torch {' or '.join(TESTED)}"
        )


def _check_hook_order() -> None:
    """The gate hangs on this: pre-hook, then (with its arguments) the update."""
    seen: list[str] = []
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def before(
        _: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        seen.append("hook" if float(parameter.detach()) == 0.0 else "late")

        def closure() -> torch.Tensor:
            seen.append("closure")
            parameter.grad = torch.ones(1)
            return torch.zeros(())

        return (args[0], closure), kwargs

    optimizer.register_step_pre_hook(before)
    optimizer.step()
    if seen != ["hook", "closure"] or float(parameter.detach()) != -1.0:
        raise IncompatibleMachine(
            f"torch {torch.__version__}: optimizer step pre-hooks behave otherwise than expected "
            f"(saw {', '.join(seen)}); use torch {' or '.join(TESTED)}"
        )
