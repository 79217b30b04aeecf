"""`torch.distributed` as a script under trainmover sees it.

The default group exists before `main` runs. A script written for torchrun may initialise it
again, ask for `gloo` or `nccl` groups, and destroy them: each means ours, with one notice. Before
`main` there is no group, and using it is a mistake. As a plain script the groups are torch's own;
only a second initialisation and the early end of the default group are taken care of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from trainmover.errors import ScriptError
from trainmover.worker.mistakes import USED_BEFORE_RUN
from trainmover.worker.torch_memory import forget_compiled, forget_meshes

OURS = "trainmover"
MEANT_AS_OURS = frozenset({"", OURS, "gloo", "nccl", "xccl", "undefined"})


def means_ours(backend: object) -> bool:
    """Whether a script that asks for this backend is content with ours ("cpu:gloo,cuda:nccl")."""
    parts = str(backend or "").lower().split(",")
    return all(part.rpartition(":")[2] in MEANT_AS_OURS for part in parts)


class DistributedEntry:
    """Replaces the three functions while a worker runs a script."""

    def __init__(self, notice: Callable[[str, str], None], on_group: Callable[[], None]) -> None:
        self._notice = notice
        self._on_group = on_group
        self._told: set[str] = set()
        self._has_group = False
        self._real_init = c10d.init_process_group
        self._real_new_group = c10d.new_group
        self._real_destroy = c10d.destroy_process_group

    def install(self) -> None:
        """Once per process, before the script is loaded."""
        for name, function in (
            ("init_process_group", self._init),
            ("new_group", self._new_group),
            ("destroy_process_group", self._destroy),
        ):
            setattr(c10d, name, function)
            setattr(dist, name, function)
        device_mesh = sys.modules.get("torch.distributed.device_mesh")
        if device_mesh is not None:
            for name, function in (
                ("init_process_group", self._init),
                ("new_group", self._new_group),
            ):
                if hasattr(device_mesh, name):
                    setattr(device_mesh, name, function)

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._notice("notice", text)

    def _init(self, *args: Any, **kwargs: Any) -> None:
        if not self._has_group:
            raise ScriptError(f"init_process_group: {USED_BEFORE_RUN}")
        if not dist.is_initialized():
            self._real_init(*args, **kwargs)
            return
        backend = kwargs.get("backend", args[0] if args else None)
        if not means_ours(backend):
            raise ScriptError(_other_backend("init_process_group", backend))
        world_size = kwargs.get("world_size", -1)
        if world_size not in (-1, None, dist.get_world_size()):
            raise ScriptError(
                f"init_process_group(world_size={world_size}): this job has "
                f"{dist.get_world_size()} ranks; leave world_size out"
            )
        self._tell(
            "init",
            "init_process_group: the job's group exists already (trainmover's own, whichever "
            "backend was named); the call does nothing",
        )

    def _new_group(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_group:
            raise ScriptError(f"new_group: {USED_BEFORE_RUN}")
        backend = kwargs.get("backend", args[2] if len(args) > 2 else None)
        if not means_ours(backend):
            raise ScriptError(_other_backend("new_group", backend))
        if backend not in (None, "", OURS):
            self._tell("group", f"new_group(backend={backend!r}) means trainmover's own group")
            if "backend" in kwargs:
                kwargs = {**kwargs, "backend": None}
            else:
                args = (*args[:2], None, *args[3:])
        self._on_group()
        return self._real_new_group(*args, **kwargs)

    def _destroy(self, *args: Any, **kwargs: Any) -> None:
        group = args[0] if args else kwargs.get("group")
        if not self._has_group:
            raise ScriptError(f"destroy_process_group: {USED_BEFORE_RUN}")
        if group is None or group is c10d._get_default_group():
            self._tell(
                "destroy",
                "destroy_process_group does nothing: the job's group ends with the job",
            )
            return
        self._real_destroy(*args, **kwargs)

    def reset(self, start: Callable[[], None]) -> None:
        """A new entry of `main`: all groups of the last one are gone, counters begin anew."""
        before, has_parts = -1, False
        if dist.is_initialized():
            before, has_parts = dist.get_rank(), len(c10d._world.pg_map) > 1
            self._real_destroy()
            forget_meshes()
        self._has_group = True
        start()
        if has_parts and dist.get_rank() != before:
            forget_compiled()


def _other_backend(function: str, backend: object) -> str:
    return (
        f"{function}(backend={backend!r}): under trainmover every group is its own, so that it is "
        "fenced and survives a switchover; a group of another backend would not. Leave the backend "
        'out ("gloo" and "nccl" mean ours)'
    )


class PlainEntry:
    """The same three functions where the script is run without an agent."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._told: set[str] = set()
        self._own: dict[str, Callable[..., None]] = {
            "init_process_group": self._init,
            "destroy_process_group": self._destroy,
        }
        self._real = {name: getattr(c10d, name) for name in self._own}

    def install(self) -> None:
        """Also where the script has imported the functions by name already."""
        for name, function in self._own.items():
            _replace(name, self._real[name], function)

    def remove(self) -> None:
        """Put torch's own functions back."""
        for name, function in self._own.items():
            _replace(name, function, self._real[name])

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._notice(text)

    def _init(self, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            self._real["init_process_group"](*args, **kwargs)
            return
        self._tell("init_process_group: the group exists already; the call does nothing")

    def _destroy(self, *args: Any, **kwargs: Any) -> None:
        group = args[0] if args else kwargs.get("group")
        if group is None or group is c10d._get_default_group():
            self._tell("destroy_process_group does nothing: the group ends behind main")
            return
        self._real["destroy_process_group"](*args, **kwargs)


def _replace(name: str, old: object, new: object) -> None:
    """In every module that has the function under its own name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get(name) is old:
            names[name] = new
