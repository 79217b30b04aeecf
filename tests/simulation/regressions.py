"""Worlds that prove the checker can fail, and seeds that once found something.

A seed's world changes whenever the drawing of scenarios does; what a mutant needs is therefore
aimed: few faults at the moment at which the missing rule matters.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.simulation.scenario import Fault, Scenario, draw_scenario

REGRESSIONS: tuple[tuple[int, str], ...] = (
    (36, "a loss at step 0 could be built anew but ended the job"),
    (55, "the controller's next deadline stayed in the past behind a script failure"),
    (94, "a controller restart forgot who was still building"),
    (146, "a gate limit in the past was due for ever in a broken generation"),
    (62, "a rank that had left main for a start that was aborted seemed to contradict the others"),
    (489, "a checkpoint of steps that an open roll-back was about to leave counted"),
)


def _fault(kind: str, aim: str, at_s: float = 0.3, lasts_s: float = 14.0) -> Fault:
    return Fault(at_s, False, kind, lasts_s, aim)


def aimed(seed: int, *faults: Fault, machines: int = 3, steps: int = 12) -> Scenario:
    """A quick job whose only faults are `faults`."""
    return replace(
        draw_scenario(seed),
        machines=machines,
        workers_per_machine=1,
        standbys=2,
        steps=steps,
        step_s=0.1,
        channel_delay_s=0.02,
        link_delay_s=0.0005,
        append_s=0.0,
        build_s=0.1,
        loss=0.0,
        duplication=0.0,
        changes_in_tail=False,
        run_out_fails=0.0,
        script_fails_at=-1,
        revive_s=0.0,
        faults=faults,
        is_sharded=False,
        snapshot_every=0,
        checkpoint_every=0,
        increments_kept=0,
    )


TWO_IN_THE_GATE = (_fault("kill_worker", "gate"), _fault("kill_worker", "gate", 0.6))
TWO_IN_THE_TAIL = (_fault("kill_worker", "tail"), _fault("kill_worker", "tail", 0.6))
AT_ONCE_IN_THE_TAIL = (_fault("kill_worker", "tail"), _fault("kill_worker", "tail"))
PAUSED = (_fault("freeze_machine", "gate"),)

SEEDS_TO_TRY = 48
"""Within so many seeds a mutant must be found."""

MUTANTS: tuple[tuple[str, tuple[Fault, ...], int, int], ...] = (
    ("hold_back", (), 3, 12),
    ("wait_for_commit", (), 3, 12),
    ("finish", TWO_IN_THE_TAIL, 3, 5),
    ("hold", TWO_IN_THE_GATE, 3, 12),
    ("freeze_closes_gates", TWO_IN_THE_GATE, 3, 12),
    ("report_after_tail", AT_ONCE_IN_THE_TAIL, 4, 12),
    ("pause", PAUSED, 2, 60),
)
"""Rule, faults, machines and steps of the world in which its absence shows."""
