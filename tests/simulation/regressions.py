"""Seeds that found something, kept with what they found; and seeds that prove the checker can fail.

A seed's world changes whenever a scenario's drawing does; a mutant's seed then has to be looked for
again (`run(1000, without=(rule,))` prints it).
"""

from __future__ import annotations

REGRESSIONS: tuple[tuple[int, str], ...] = (
    (55, "the controller's next deadline stayed in the past behind a script failure"),
    (169, "a loss at step 0 could be built anew but ended the job"),
    (419, "a controller that was hung itself blamed the machines"),
    (721, "identities unknown after a restart ended the job"),
)

MUTANTS: tuple[tuple[str, int], ...] = (
    ("hold_back", 0),
    ("wait_for_commit", 0),
)
