"""Named phases of both kinds of switchover, in order, with the process that passes each.

Decides the vocabulary of drills: a fault can be injected in any process when it reaches any of
these. The controller's phases are announced by its decider (`PhaseReached`); the others by the
worker. `trainmover phases` prints this list, and a test demands a victim for every entry.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Kind = Literal["planned", "unplanned"]
Process = Literal["controller", "joiner", "leaver", "stayer"]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One point at which a process can be made to fail."""

    name: str
    kinds: tuple[Kind, ...]
    passed_by: tuple[Process, ...]
    """Processes that announce it; any other process can be the victim while it is passed."""
    text: str


BOTH: Final[tuple[Kind, ...]] = ("planned", "unplanned")
PLANNED: Final[tuple[Kind, ...]] = ("planned",)
UNPLANNED: Final[tuple[Kind, ...]] = ("unplanned",)

PHASES: Final[tuple[Phase, ...]] = (
    Phase(
        name="detected",
        kinds=UNPLANNED,
        passed_by=("controller", "stayer"),
        text="the first sign of a loss: a channel broke, a process ended, a machine fell silent",
    ),
    Phase(
        name="poisoned",
        kinds=UNPLANNED,
        passed_by=("stayer",),
        text="the generation is marked broken here and poison has been sent to all peers",
    ),
    Phase(
        name="run_out",
        kinds=UNPLANNED,
        passed_by=("stayer",),
        text="the interrupted step has ended by itself and is undone",
    ),
    Phase(
        name="reported",
        kinds=UNPLANNED,
        passed_by=("stayer",),
        text="the freeze has been answered",
    ),
    Phase(
        name="all_reported",
        kinds=UNPLANNED,
        passed_by=("controller",),
        text="every member has reported or is excluded",
    ),
    Phase(
        name="prepare",
        kinds=PLANNED,
        passed_by=("controller", "joiner", "leaver", "stayer"),
        text="the plan of a planned switchover is journaled (controller) or has arrived (worker)",
    ),
    Phase(
        name="joiner_chosen",
        kinds=BOTH,
        passed_by=("controller", "joiner"),
        text="it is decided who takes over (controller), and it knows (joiner)",
    ),
    Phase(
        name="decided",
        kinds=UNPLANNED,
        passed_by=("controller",),
        text="version and membership of the new generation are decided",
    ),
    Phase(
        name="source_chosen",
        kinds=UNPLANNED,
        passed_by=("controller",),
        text="each joiner has a source for each part of its state",
    ),
    Phase(
        name="journalled_not_sent",
        kinds=BOTH,
        passed_by=("controller",),
        text="plan or commit is journaled, nobody has been told",
    ),
    Phase(
        name="sent_to_half",
        kinds=BOTH,
        passed_by=("controller",),
        text="plan or commit has been sent to half of those who need it",
    ),
    Phase(
        name="endpoints_exchanged",
        kinds=BOTH,
        passed_by=("joiner", "stayer"),
        text="the other end's address of each added channel is known and answered",
    ),
    Phase(
        name="delta_acknowledged",
        kinds=PLANNED,
        passed_by=("joiner", "leaver", "stayer"),
        text="phase one is done here: added channels are open beside the old ones",
    ),
    Phase(
        name="flag_set",
        kinds=PLANNED,
        passed_by=("controller", "leaver", "stayer"),
        text="the switchover's number rides on the next gate",
    ),
    Phase(
        name="boundary_reached",
        kinds=PLANNED,
        passed_by=("leaver", "stayer"),
        text="stopped at the boundary behind the flagged gate",
    ),
    Phase(
        name="delta_swapped",
        kinds=BOTH,
        passed_by=("joiner", "leaver", "stayer"),
        text="added channels have taken the place of the dropped ones",
    ),
    Phase(
        name="half_state_sent",
        kinds=BOTH,
        passed_by=("joiner", "leaver", "stayer"),
        text="half of the bytes of a role's state have moved",
    ),
    Phase(
        name="digests_verified",
        kinds=BOTH,
        passed_by=("joiner",),
        text="the joiner's state equals its source's",
    ),
    Phase(
        name="all_prepared",
        kinds=BOTH,
        passed_by=("controller",),
        text="every member is prepared and their digests are equal; the commit is not journaled",
    ),
    Phase(
        name="leaver_released",
        kinds=PLANNED,
        passed_by=("controller", "leaver"),
        text="the leaver's state is needed no more",
    ),
)


def phase_named(name: str) -> Phase:
    """The phase called `name`. Raises KeyError for an unknown one."""
    for phase in PHASES:
        if phase.name == name:
            return phase
    raise KeyError(name)
