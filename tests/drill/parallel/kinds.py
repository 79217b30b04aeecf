"""The ways train_gpt.py can be spread over ranks, as jobs of drills, and what a loss may cost each.

Decides sizes: a step of some milliseconds, enough steps for two machines and a worker to go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trainmover.drills.request import FOLDER_WORD, JobRequest

SCRIPT = Path(__file__).with_name("paced.py")
SMALL = ("--layers", "4", "--width", "32", "--heads", "4", "--sequence", "32", "--batch", "4")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """One way to spread the model."""

    name: str
    flags: tuple[str, ...]
    machines: int = 4
    example: str = "train_gpt"
    size: tuple[str, ...] = SMALL

    def request(self, *, steps: int, standbys: int, does_compile: bool = False) -> JobRequest:
        """The job; the undisturbed one has the same arguments."""
        compiling = ("--compile", "--compiler", "aot_eager") if does_compile else ()
        return JobRequest(
            script=SCRIPT,
            arguments=(
                self.example,
                *self.size,
                *("--steps", str(steps), "--workers", "0", "--final", f"{FOLDER_WORD}/final.json"),
                *self.flags,
                *compiling,
            ),
            machines=self.machines,
            standbys=standbys,
            limit_s=500.0,
        )


def _named(name: str, *flags: str, machines: int = 4) -> Parallel:
    return Parallel(name=name, flags=("--parallel", *flags), machines=machines)


TP = _named("tp", "tp")
PIPELINE = _named("pp-1f1b", "pp")
INTERLEAVED = _named("pp-interleaved", "pp", "--schedule", "interleaved")
EXCHANGED = _named("pp-exchanged", "pp", "--shapes", "exchanged")
"""Stages tell each other their shapes in the first step, pickled."""
UNEVEN = _named("pp-uneven", "pp", "--split", "3,1")
THREE_D = _named("3d", "3d", machines=8)
EXPERTS = _named("moe", "moe")
ZERO = _named("zero", "zero")
HSDP = _named("hsdp", "hsdp")
DDP = _named("ddp", "ddp")
TWO_MODALITIES = Parallel(name="two-modalities", flags=(), example="train_two_modalities", size=())

REPLICATED = (
    DDP,
    HSDP,
    TP,
    PIPELINE,
    INTERLEAVED,
    EXCHANGED,
    UNEVEN,
    THREE_D,
    EXPERTS,
    ZERO,
    TWO_MODALITIES,
)
"""Every rank has a live replica on another machine."""

UNREPLICATED = (
    _named("fsdp2", "fsdp2"),
    _named("tp-alone", "tp", "--tensor", "4"),
    _named("pp-alone", "pp", "--stages", "4"),
    _named("moe-alone", "moe", machines=2),
    _named("zero-alone", "zero", machines=2),
)
"""Each rank holds something that no other one has."""


def changed(
    request: JobRequest,
    settings: tuple[tuple[str, str], ...],
    disturbance: tuple[tuple[str, str], ...],
) -> JobRequest:
    """The same job with more settings, and hurt by its environment."""
    return replace(request, settings=(*request.settings, *settings), disturbance=disturbance)
