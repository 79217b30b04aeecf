"""The CPU communicator: channels between workers, collectives on them, generations of both.

One `Engine` (the I/O thread) and one `Communicator` per worker process. torch sees a process
group (`init_process_group`); the worker's lifecycle sees `CommunicatorEvents` and the two-phase
change of generation. Decides nothing about who is a member.
"""

from trainmover.communicator.communicator import Communicator
from trainmover.communicator.engine import Engine, Timer
from trainmover.communicator.group import BACKEND, Group, init_process_group, register_backend
from trainmover.communicator.settings import (
    ChannelCount,
    ChannelIdentity,
    ChannelInfo,
    CollectiveCall,
    CommunicatorConfig,
    CommunicatorEvents,
    Mode,
)

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
