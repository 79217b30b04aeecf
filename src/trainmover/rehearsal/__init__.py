"""Rehearsal: what the first iteration of a role is, and how a standby walks through it.

Decides what is recorded, which ranks are of one class, how a rehearsing standby's collectives are
answered and what its script may touch. Deliberately not here: when a standby rehearses
(controller), the main thread's way through `main` (worker).
"""
