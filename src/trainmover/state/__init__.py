"""What a rank's training process is, captured and put back exactly.

Reading order: `inventory` (what is tracked), `undo` (an interrupted step), `transfer` (a joiner),
with `codec`, `rng`, `tensors` and `leaves` beneath them. Nothing here decides when any of it
happens, and nothing here knows about generations.
"""
