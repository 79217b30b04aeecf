"""The CPU communicator: channels between workers, collectives on them, generations of both.

One `Engine` (the I/O thread) and one `Communicator` per worker process. torch sees a process
group (`init_process_group`); the worker's lifecycle sees `CommunicatorEvents` and the two-phase
change of generation. Decides nothing about who is a member.

The public names are loaded when they are first used: hosts without workers read the settings of
this room, and must not import torch for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmover.communicator.communicator import Communicator
    from trainmover.communicator.engine import Engine, Timer
    from trainmover.communicator.group import Group, init_process_group, register_backend
    from trainmover.communicator.group_identity import BACKEND
    from trainmover.communicator.settings import (
        ChannelCount,
        ChannelIdentity,
        ChannelInfo,
        CollectiveCall,
        CommunicatorConfig,
        CommunicatorEvents,
        Mode,
    )

_HOMES = {
    "communicator": ("Communicator",),
    "engine": ("Engine", "Timer"),
    "group_identity": ("BACKEND",),
    "group": ("Group", "init_process_group", "register_backend"),
    "settings": (
        "ChannelCount",
        "ChannelIdentity",
        "ChannelInfo",
        "CollectiveCall",
        "CommunicatorConfig",
        "CommunicatorEvents",
        "Mode",
    ),
}

__all__ = [
    "BACKEND",
    "ChannelCount",
    "ChannelIdentity",
    "ChannelInfo",
    "CollectiveCall",
    "Communicator",
    "CommunicatorConfig",
    "CommunicatorEvents",
    "Engine",
    "Group",
    "Mode",
    "Timer",
    "init_process_group",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
